"""Package metadata. The version stands in megacp/_version.py and is read here without importing anything."""

import ast
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def version() -> str:
    """Read ``__version__`` out of the one file that states it."""
    for node in ast.parse((HERE / "megacp" / "_version.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__":
            return str(ast.literal_eval(node.value))
    raise RuntimeError("megacp/_version.py states no __version__")


def readme() -> str:
    """Give the README, which a source archive may lack."""
    path = HERE / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


setup(
    name="megacp",
    version=version(),
    description="Exact, load-balanced context parallelism for any Megatron",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["megacp", "megacp.*"]),
    package_data={"megacp": ["py.typed"]},
    install_requires=["torch", "numpy"],
    extras_require={
        "megatron": ["megatron-core==0.16.1", "sentencepiece", "rich", "psutil", "matplotlib"],
        "te": ["transformer-engine[pytorch]"],
        "flash": ["flash-attn"],
        "test": [
            "hypothesis>=6.100",
            "pyarrow>=15.0",
            "tokenizers>=0.19",
            "zstandard>=0.22",
            "import-linter>=2.17",
            "matplotlib>=3.8",
            "mypy>=2.0",
            "pybind11>=2.12",
            "pytest>=8.0",
            "pytest-xdist>=3.5",
            "rich>=13.0",
            "ruff~=0.17.6",
        ],
    },
    # Other packages add rows to the table of seams by declaring an entry point of the group "megacp.seams" in
    # their own setup.py (see megacp/hosts/rows.py). megacp's own rows are no entry points, so that they work
    # from a checkout that is not installed.
    entry_points={"console_scripts": ["megacp = megacp.cli:main"]},
    zip_safe=False,
)
