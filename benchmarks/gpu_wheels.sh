#!/bin/sh
# Wheels of the packages that the sections of gpu.py import beyond torch, triton, transformers and what these need.
#
#   sh benchmarks/gpu_wheels.sh [FOLDER]                    collects them into benchmarks/.wheels, or another folder
#   sh benchmarks/gpu_wheels.sh --install TARGET [FOLDER]   where the sections run, without a network; then PYTHONPATH=TARGET
#
# PYTHON: whose pip runs (python3). FOR: the version of Python where the sections run (3.12).
set -eu

PYTHON=${PYTHON:-python3}
FOR=${FOR:-3.12}
LIMIT_MIB=40
HERE=$(cd "$(dirname "$0")" && pwd)

PACKAGES="
blake3 gguf grpcio llguidance msgspec nvidia-ml-py protobuf psutil structlog cryptography cffi pycparser
pydantic pydantic-core annotated-types typing-inspection pytest iniconfig pluggy pytest-timeout pytest-xdist execnet
hypothesis sortedcontainers humming-kernels nvidia-cuda-cccl jinja2 markupsafe tabulate tqdm
"

if [ "${1:-}" = --install ]; then
    target=$2
    from=${3:-$HERE/.wheels}
    exec "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$target" "$from"/*.whl
fi

to=${1:-$HERE/.wheels}
mkdir -p "$to"
rm -f "$to"/*.whl
set --
for tag in _2_5 1 _2_12 2010 _2_17 2014 _2_24 _2_26 _2_27 _2_28 _2_31 _2_34; do  # pip matches each exactly
    set -- "$@" --platform "manylinux${tag}_x86_64"
done
# shellcheck disable=SC2086  # one word for each package
"$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "$FOR" "$@" \
    --constraint "$HERE/../constraints.txt" --dest "$to" $PACKAGES
kib=$(du -sk "$to" | cut -f1)
echo "$(find "$to" -name '*.whl' | wc -l) wheels for Python $FOR, $((kib / 1024)) MiB: $to"
[ "$kib" -lt $((LIMIT_MIB * 1024)) ] || { echo "They must be less than $LIMIT_MIB MiB." >&2; exit 1; }
