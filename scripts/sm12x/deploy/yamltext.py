"""YAML as people write it: keys in order, text of several lines as such."""

from __future__ import annotations

import yaml


class _Dumper(yaml.SafeDumper):
    pass


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _text)


def dump(content: dict[str, object]) -> str:
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=1000)
