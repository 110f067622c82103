#!/usr/bin/env bash
# Runs a command while an NVIDIA MPS server is up, so that the processes of several ranks share one GPU at once:
#   benchmarks/mps.sh python benchmarks/bench.py --ranks 2 4 8
set -u
export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
nvidia-cuda-mps-control -d || exit 1
trap 'echo quit | nvidia-cuda-mps-control > /dev/null' EXIT
"$@"
