#!/bin/sh
# Regenerates the stubs beside the .proto files (needs grpcio-tools; a test checks that they are current).
set -eu
cd "$(dirname "$0")"
python="${PYTHON:-python3}"
"$python" -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. headrace_proto/*.proto
