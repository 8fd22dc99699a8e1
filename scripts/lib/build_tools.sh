# shellcheck shell=bash
# shellcheck disable=SC2154  # venv and checkout come from common.sh
# Shared by scripts/build-kernels and scripts/build-wheel: what compiling needs, found or fetched.
# Source it after common.sh.

pip_hint="Without network: set PIP_INDEX_URL to a mirror, or PIP_NO_INDEX=1 and PIP_FIND_LINKS to a
folder with wheels"

# True for a Python that has torch (only its headers are used), cmake and ninja.
has_tools() {
  "$1" - 2> /dev/null << 'END'
import importlib.metadata as m, importlib.util as u, sys
torch = tuple(int(part) for part in m.version("torch").split(".")[:2])
sys.exit(torch < (2, 10) or not u.find_spec("cmake") or not u.find_spec("ninja"))
END
}

# build_python WORK sets $python: the one of .venv, the system's, or one made in WORK/venv.
build_python() {
  local work=$1 candidate base
  python=''
  for candidate in "$venv/bin/python" "$work/venv/bin/python" "$(command -v python3 || true)"; do
    if [ -n "$candidate" ] && [ -x "$candidate" ] && has_tools "$candidate"; then
      python=$candidate
      return
    fi
  done
  say "setting up ${work#"$checkout"/}/venv: cmake, ninja and torch for its headers (about 1 GB)"
  base=$(find_python)
  "$base" -m venv --clear "$work/venv"
  python="$work/venv/bin/python"
  local pip=("$python" -m pip install -q --disable-pip-version-check --retries 2)
  "${pip[@]}" 'cmake>=3.22' ninja 'scikit-build-core>=0.11' || die "pip failed. $pip_hint"
  # No dependencies: nothing is imported, and a CUDA build of torch would bring gigabytes of them.
  "${pip[@]}" --no-deps torch==2.13.0 || die "pip failed on torch. $pip_hint"
}

# find_cuda NAME prints the path of a program of the toolkit. Needs $python and $cuda_tools.
find_cuda() { "$python" scripts/lib/cuda_tools.py "$1" --under "$cuda_tools"; }

# cuda_compiler WORK sets $nvcc: the system's if it is new enough, else NVIDIA's wheels in WORK/tools.
cuda_compiler() {
  cuda_tools="$1/tools"
  if ! find_cuda nvcc > /dev/null 2>&1 || ! find_cuda cuobjdump > /dev/null 2>&1; then
    say "installing NVIDIA's compiler wheels into ${cuda_tools#"$checkout"/} (112 MB)"
    "$python" -m pip install -q --disable-pip-version-check --retries 2 --no-deps --upgrade \
      --target "$cuda_tools" -r requirements/kernels.txt || die "pip failed on the compiler. $pip_hint"
  fi
  # shellcheck disable=SC2034  # used by the scripts that source this file
  nvcc=$(find_cuda nvcc)
}
