#!/usr/bin/env bash
# Build the real Transformer Engine in an environment of its own, and check megacp against it. No GPU is needed.
#
#   bash tools/te_check/run.sh [arguments of tools/te_check/__main__.py]
#
#   MEGACP_TE_VENV    the environment, .venv-te if not set; one that has transformer_engine already is used as it is
#   MEGACP_PYTHON     the python that makes it, python3 if not set
#   TORCH, TE, CORE   the versions: 2.14.1, 2.20.2 and 0.16.1 if not set. torch is the build for CUDA: 5 GB
#   CUDA_HOME         the CUDA toolkit, of the same major version as torch's; the one of the nvcc on PATH if not set
#
# The build takes six minutes on two cores, and is done once.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=${MEGACP_TE_VENV:-$root/.venv-te}
python=$venv/bin/python

say() { echo "te_check: $*" >&2; }

if ! "$python" -c 'import transformer_engine.pytorch, megatron.core' >/dev/null 2>&1; then
    if [ -z "${CUDA_HOME:-}" ]; then
        nvcc=$(command -v nvcc) || {
            say "there is no nvcc. Install the CUDA toolkit (no GPU is needed to build) and name it in CUDA_HOME."
            exit 2
        }
        # nvcc may be a link, or a script that starts the real one: ask it where it stands
        CUDA_HOME=$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
        CUDA_HOME=$(cd "${CUDA_HOME:-$(dirname "$(readlink -f "$nvcc")")/..}" && pwd)
    fi
    say "making $venv with torch ${TORCH:-2.14.1} and transformer-engine ${TE:-2.20.2}, by $CUDA_HOME; this is done once."
    [ -x "$python" ] || "${MEGACP_PYTHON:-python3}" -m venv "$venv"
    pip() { "$python" -m pip --disable-pip-version-check "$@" >&2; }
    pip install "torch==${TORCH:-2.14.1}"
    cuda=$("$python" -c 'import torch; print((torch.version.cuda or "").split(".")[0])')
    [ -n "$cuda" ] || {
        say "torch ${TORCH:-2.14.1} in $venv is a build without CUDA, and Transformer Engine needs one with it."
        exit 2
    }
    pip install numpy rich ninja pybind11 setuptools wheel packaging pydantic importlib-metadata onnx onnxscript einops \
        nvdlfw-inspect
    pip install --no-deps "transformer-engine==${TE:-2.20.2}" "transformer-engine-cu$cuda==${TE:-2.20.2}"
    nvidia=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/nvidia
    say "building transformer-engine-torch ${TE:-2.20.2}; six minutes on two cores."
    CUDA_HOME=$CUDA_HOME CUDNN_PATH=$nvidia/cudnn NVTE_FRAMEWORK=pytorch MAX_JOBS=${MAX_JOBS:-2} \
        CPATH=$nvidia/cudnn/include:$nvidia/nccl/include:$nvidia/cu$cuda/include${CPATH:+:$CPATH} \
        "$python" -m pip install --disable-pip-version-check --no-build-isolation --no-deps \
        "transformer-engine-torch==${TE:-2.20.2}" >&2
    pip install --no-deps "megatron-core==${CORE:-0.16.1}"
fi

PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" "$root/tools/te_check" "$@"
