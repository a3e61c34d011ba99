"""`python -P -m sm12x.runtime.tiny DIR`: a model to try a server with, made on the spot.

A config.json and a tokenizer, no weights: `vllm serve DIR --load-format dummy` makes those up. Two
layers start in seconds; the text that comes out is noise, the same for the same request at
temperature 0. All code between a client and a GPU is the real one.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR

from sm12x.core.errors import BadFileError, Sm12xError, UsageError
from sm12x.core.files import write_text

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Turns as Qwen writes them.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Tokens. Enough for a chat, and a KV cache of 2 KiB per token stays small.
_CONTEXT = 4096


def files() -> dict[str, object]:
    """The content of the model's folder by file name."""
    alphabet = byte_alphabet()
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    specials = {word: len(alphabet) + number for number, word in enumerate(_SPECIAL)}
    config: dict[str, object] = {
        # A plain dense model: attention and matrix products that every GPU can run, no MoE kernels
        # that are compiled when the server starts.
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        # A width that every attention kernel has.
        "head_dim": 64,
        "attention_bias": False,
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        # bfloat16 needs compute capability 8.0.
        "torch_dtype": "float16",
        "vocab_size": len(vocabulary) + len(specials),
        "eos_token_id": specials["<|im_end|>"],
        "pad_token_id": specials["<|endoftext|>"],
    }
    byte_level: dict[str, object] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
    }
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": word,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for word, number in specials.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        # Without merges every byte is a token.
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": _CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    return {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }


def byte_alphabet() -> list[str]:
    """One printable character per byte, in order of the bytes.

    Byte-level BPE as GPT-2 introduced it: printable Latin-1 stands for itself, every other byte for
    the next free character from U+0100 on.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(free)) for byte in range(256)]


def make(folder: Path) -> None:
    """Write the model's files; files that are there already are replaced.

    Raises:
        BadFileError: the folder cannot be written, or another user can choose what is in it.
    """
    try:
        # The default is a name in /tmp, where anybody may be first: no link, no folder of others.
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
        if not S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise BadFileError(
                f"{folder} is not a folder that this user alone can write to",
                next_step="remove it, or name another one: model=DIR after the recipe's name",
            )
        for name, content in files().items():
            write_text(folder / name, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise BadFileError(
            f"{folder} cannot be written: {error.strerror}",
            next_step="name a folder that can be: model=DIR after the recipe's name",
        ) from None


def main(arguments: list[str]) -> int:
    try:
        if len(arguments) != 1:
            raise UsageError(
                "one folder is expected", next_step="python -P -m sm12x.runtime.tiny DIR"
            )
        make(Path(arguments[0]))
    except Sm12xError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
