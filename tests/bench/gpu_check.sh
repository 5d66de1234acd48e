#!/bin/sh
# See gpu_check.py. Usage: tests/bench/gpu_check.sh [PYTHON [SITE]]
cd "$(dirname "$0")/../.." || exit 1
exec "${1:-python3}" tests/bench/gpu_check.py ${2:+"$2"}
