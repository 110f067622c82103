#!/usr/bin/env bash
# Builds for this machine's GPU, runs the demo, tests several ranks on it under MPS, checks with compute-sanitizer, and
# measures.
#   tests/run_on_gpu.sh OUT_DIR [build demo sanitize bench replays test]
# Writes OUT_DIR/gpu.json (what ran, what passed) and OUT_DIR/bench.json. Needs torch, pybind11, scikit-build-core, cmake,
# ninja, pytest, pytest-timeout, hypothesis and nvcc; installs nothing else. COMMIT names the tree where git cannot;
# TEST_ARGS and BENCH_ARGS go to pytest and to benchmarks/bench.py; the *_LIMIT_S end a step.
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
steps=${*:-build demo sanitize bench replays test}
cd "$(dirname "$0")/.."
commit=${COMMIT:-$(git rev-parse HEAD 2> /dev/null || echo unknown)}
status=0
note() { printf '\n== %s (%s)\n' "$1" "$(date +%T)"; }
has_step() { [[ " $steps " == *" $1 "* ]]; }
record() { printf '%s\t%s\t%s\n' "$1" "$2" "$3" >> "$out/steps.tsv"; }
: > "$out/steps.tsv"

if has_step build; then
  note build
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
  python3 -m pip install --quiet --no-build-isolation --no-deps \
    -C cmake.define.MSCCLPP_DISPATCHER_CUDA=ON \
    -C cmake.define.MSCCLPP_DISPATCHER_CUDA_ARCHITECTURES="${capability}-real" -e . > "$out/build.log" 2>&1 ||
    { tail -30 "$out/build.log"; exit 1; }
fi

if has_step demo; then
  note demo
  benchmarks/mps.sh timeout "${DEMO_LIMIT_S:-120}" python3 -u -m mscclpp_dispatcher.demo --ranks 4 --timeout 60 \
    --plot "$out/demo.png" > "$out/demo.log" 2>&1
  code=$?
  tail -14 "$out/demo.log"
  [[ $code == 0 ]] || status=1
  record "python -m mscclpp_dispatcher.demo --ranks 4" "$code" "$(tail -1 "$out/demo.log")"
fi

if has_step sanitize; then
  # Our kernels alone, except where the tool must see all writes to know what is initialised. Each dispatch block has a
  # barrier per bulk copy in flight, more than synccheck tracks by default.
  declare -A options=(
    [memcheck]="--kernel-name kns=ll_" [racecheck]="--kernel-name kns=ll_"
    [synccheck]="--kernel-name kns=ll_ --num-cuda-barriers 4096" [initcheck]="")
  declare -A cases=([memcheck]=every_kernel [racecheck]=every_kernel [synccheck]=every_kernel
    [initcheck]="every_kernel and bf16")
  for tool in ${SANITIZE_TOOLS:-memcheck racecheck synccheck initcheck}; do
    note "compute-sanitizer $tool"
    MSCCLPP_DISPATCHER_TEST_DEVICE=cuda PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "${SANITIZE_LIMIT_S:-120}" \
      compute-sanitizer --tool "$tool" ${options[$tool]} --error-exitcode 9 \
      python3 -m pytest -q -p no:cacheprovider tests/engine/test_serial_ranks.py -k "${cases[$tool]}" \
      > "$out/$tool.log" 2>&1
    code=$?
    tail -3 "$out/$tool.log"
    [[ $code == 0 ]] || status=1
    record "compute-sanitizer --tool $tool" "$code" "$(grep -hE 'passed|ERROR SUMMARY|RACECHECK' "$out/$tool.log" | tr '\n' ' ')"
  done
fi

if has_step bench; then
  note bench
  benchmarks/mps.sh timeout "${BENCH_LIMIT_S:-240}" python3 benchmarks/bench.py ${BENCH_ARGS:---ranks 2 4 8} \
    --commit "$commit" --json "$out/bench.json" > "$out/bench.log" 2>&1
  code=$?
  tail -30 "$out/bench.log"
  [[ $code == 0 ]] || status=1
  record "benchmarks/bench.py ${BENCH_ARGS:---ranks 2 4 8}" "$code" ""
fi

# Ten thousand replays of one pair, with new tokens and routes, while some blocks are held back at random.
if has_step replays; then
  note "replays with random delays"
  MSCCLPP_DISPATCHER_TEST_DEVICE=cuda MSCCLPP_DISPATCHER_TEST_REPLAYS=10000 \
    MSCCLPP_DISPATCHER_STRESS_DELAY_NS=20000 benchmarks/mps.sh timeout -s INT "${REPLAYS_LIMIT_S:-300}" \
    python3 -m pytest -q -p no:cacheprovider --timeout 290 tests/graph -k "long_replay and expert_reduce" \
    > "$out/replays.log" 2>&1
  code=$?
  tail -5 "$out/replays.log"
  [[ $code == 0 ]] || status=1
  record "10000 replays of one pair, 2, 4 and 8 ranks, delays to 20 us in kernels" "$code" "$(tail -1 "$out/replays.log")"
fi

if has_step test; then
  note tests
  test_args=${TEST_ARGS:-tests/graph tests/faults tests/engine}
  MSCCLPP_DISPATCHER_TEST_DEVICE=cuda benchmarks/mps.sh timeout -s INT "${TEST_LIMIT_S:-900}" \
    python3 -m pytest -q -p no:cacheprovider --durations 5 $test_args > "$out/tests.log" 2>&1
  code=$?
  tail -40 "$out/tests.log"
  [[ $code == 0 ]] || status=1
  record "pytest $test_args" "$code" "$(tail -1 "$out/tests.log")"
fi

GPU=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1) COMMIT=$commit OUT_DIR=$out python3 - << 'PYTHON'
import datetime, json, os, pathlib

out = pathlib.Path(os.environ["OUT_DIR"])
steps = [line.split("\t") for line in (out / "steps.tsv").read_text().splitlines()]
report = {
    "gpu": os.environ["GPU"],
    "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    "commit": os.environ["COMMIT"],
    "steps": [{"command": command, "exit_status": int(code), "summary": summary} for command, code, summary in steps],
}
(out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
PYTHON
exit $status
