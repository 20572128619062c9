"""Write pagoda.v1, the Python code of protos/: ``python scripts/generate_protos.py``."""

import os
import sys
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTOS = ROOT / "protos"
OUTPUT = ROOT / "client"


def is_stale() -> bool:
    """Whether some .proto is newer than its generated code, or has none."""
    for proto in PROTOS.rglob("*.proto"):
        code = OUTPUT / proto.relative_to(PROTOS).with_name(f"{proto.stem}_pb2.py")
        if not code.exists() or code.stat().st_mtime < proto.stat().st_mtime:
            return True
    return False


def generate() -> None:
    """Run protoc over every .proto: messages, gRPC stubs and the types of both.

    Raises:
        RuntimeError: protoc refused a file; its message is on stderr.
    """
    from grpc_tools import protoc  # not installed where the generated code is carried along

    # The plugin is a script beside this interpreter; the environment may not be activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    outputs = [
        f"--python_out={OUTPUT}",
        f"--pyi_out={OUTPUT}",
        f"--grpc_python_out={OUTPUT}",
        f"--mypy_grpc_out=quiet:{OUTPUT}",
    ]
    protos = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    includes = [f"-I{PROTOS}", f"-I{files('grpc_tools') / '_proto'}"]
    if protoc.main(["protoc", *includes, *outputs, *protos]) != 0:
        raise RuntimeError("protoc refused the files in protos/")
    (OUTPUT / "pagoda" / "v1" / "__init__.py").touch()


if __name__ == "__main__":
    generate()
