"""Where things are in the image."""

from __future__ import annotations

import os
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sm12x.core.errors import BadFileError
from sm12x.wheel.ledger import FLASHINFER_RECORD

# Every cache that vLLM and what it compiles with write to; the image points each under /cache.
CACHE_VARIABLES = (
    "HF_HOME",
    "VLLM_CACHE_ROOT",
    "FLASHINFER_WORKSPACE_BASE",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "DG_JIT_CACHE_DIR",
    "TILELANG_CACHE_DIR",
    "TVM_FFI_CACHE_DIR",
    "CUTE_DSL_CACHE_DIR",
    # What the driver compiles from PTX.
    "CUDA_CACHE_PATH",
    "XDG_CACHE_HOME",
)


@dataclass(frozen=True, kw_only=True)
class Places:
    """``site`` is the folder the packages are installed in, ``system`` that of the whole system."""

    root: Path
    site: Path
    cuda_home: Path
    cache: Path
    system: Path = Path("/")

    @classmethod
    def of_image(cls, environ: Mapping[str, str] = os.environ) -> Places:
        root = environ.get("SM12X_IMAGE_ROOT", "")
        return cls(
            root=Path(root or "/opt/sm12x"),
            system=Path(root or "/"),
            site=Path(sysconfig.get_path("purelib")),
            cuda_home=Path(environ.get("CUDA_HOME", "/opt/cuda")),
            cache=Path(environ.get("SM12X_IMAGE_CACHE", "/cache")),
        )

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.json"

    @property
    def lock(self) -> Path:
        return self.root / "requirements.lock"

    @property
    def recipes(self) -> Path:
        return self.root / "recipes"

    @property
    def flashinfer(self) -> Path:
        """The record of FlashInfer's modules that were compiled ahead of time."""
        return self.root / FLASHINFER_RECORD

    @property
    def stand_in(self) -> Path:
        """The libcuda that only `check` uses, where there is no driver."""
        return self.root / "check" / "libcuda.so.1"


def require_temporary() -> None:
    """Raise BadFileError unless there is a folder for temporary files."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise BadFileError(
            f"no folder for temporary files can be written: {error.strerror}",
            next_step="add `--tmpfs /tmp:exec` to docker run, next to --read-only",
        ) from None
