#!/usr/bin/env bash
# Installs everything into a virtual environment of its own and runs lint, builds and tests:
#   bash tests/run.sh [pytest arguments]
# TORCH names the torch to install (default: the newest). With nvcc, the CUDA engine is compiled for every architecture.
# Without a GPU the tests run on the CPU engine; tests/run_on_gpu.sh runs them on a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD
venv=${VENV:-$repository/.venv-tests}
step() { printf '\n== %s (%s)\n' "$1" "$(date +%T)"; }

packages=()
command -v spin > /dev/null || packages+=(spin)
command -v g++ > /dev/null || packages+=(g++)
if ((${#packages[@]})); then
  step "Debian packages: ${packages[*]}"
  sudo=$([[ $(id -u) == 0 ]] || echo sudo)
  $sudo apt-get update -qq
  $sudo apt-get install -y -qq "${packages[@]}" > /dev/null
fi

step "virtual environment"
python3 -m venv "$venv"
export PATH=$venv/bin:$PATH
python -m pip install --quiet --upgrade pip
python -m pip install --quiet "${TORCH:-torch}"
python -m pip install --quiet "scikit-build-core>=0.10" "pybind11>=2.12" "cmake>=3.28" ninja

step "package and test tools"
build_log=$(mktemp)
python -m pip install --no-build-isolation -v -e '.[dev]' > "$build_log" 2>&1 || { tail -40 "$build_log"; exit 1; }
grep -h "mscclpp_dispatcher: " "$build_log" | sort -u || true

step "lint"
ruff check .
ruff format --check .
git ls-files 'csrc/*.?pp' 'csrc/*.cu*' | xargs clang-format --dry-run --Werror

if command -v nvcc > /dev/null; then
  step "build without nvcc"
  MSCCLPP_DISPATCHER_CUDA=OFF python -m pip wheel --quiet --no-build-isolation --no-deps -w "$(mktemp -d)" .
fi

step "tests"
python -m pytest "$@"
