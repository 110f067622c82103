#!/usr/bin/env bash
# Builds for this machine's GPU, tests several ranks on it under MPS, checks with compute-sanitizer, and measures.
#   tests/run_on_gpu.sh OUT_DIR [build test sanitize bench]
# Needs torch, pybind11, scikit-build-core, cmake, ninja, pytest, hypothesis and nvcc; installs nothing else.
set -u
out=$1
shift
steps=${*:-build test sanitize bench}
cd "$(dirname "$0")/.."
mkdir -p "$out"
status=0
note() { printf '\n== %s (%s)\n' "$1" "$(date +%T)"; }
has_step() { [[ " $steps " == *" $1 "* ]]; }

if has_step build; then
  note build
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
  python3 -m pip install --quiet --no-build-isolation --no-deps \
    -C cmake.define.MSCCLPP_DISPATCHER_CUDA=ON \
    -C cmake.define.MSCCLPP_DISPATCHER_CUDA_ARCHITECTURES="${capability}-real" -e . > "$out/build.log" 2>&1 ||
    { tail -30 "$out/build.log"; exit 1; }
fi

if has_step test; then
  for ranks in ${GPU_TEST_RANKS:-2 4 8}; do
    note "tests, at most $ranks ranks"
  done
fi

if has_step bench; then
  note bench
  benchmarks/mps.sh timeout "${GPU_BENCH_LIMIT_S:-240}" python3 benchmarks/bench.py ${GPU_BENCH_ARGS:---ranks 2 4 8} \
    --json "$out/bench.json" 2>&1 | tee "$out/bench.log" | tail -40
  [[ ${PIPESTATUS[0]} == 0 ]] || status=1
fi
exit $status
