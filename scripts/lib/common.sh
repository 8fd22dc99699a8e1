# shellcheck shell=bash
# Shared by the scripts: where the checkout is, what to say, and a Python that can make a venv.

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck disable=SC2034  # used by the scripts that source this file
venv="$checkout/.venv"

say() { printf '==> %s\n' "$*"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Install Debian packages, as root or through a sudo that asks nothing.
apt_install() {
  command -v apt-get > /dev/null || die "please install: $* (there is no apt-get here)"
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2> /dev/null || die "as root, please: apt-get install $*"
    as_root=(sudo -n)
  fi
  say "installing $* with apt-get"
  local install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends
    -o DPkg::Lock::Timeout=600)
  "${as_root[@]}" "${install[@]}" "$@" > /dev/null 2>&1 || {
    "${as_root[@]}" apt-get update -qq || die "no network: apt-get cannot reach its package lists"
    "${as_root[@]}" "${install[@]}" "$@" > /dev/null || die "apt-get could not install $*"
  }
}

# Print the newest Python from 3.11 on that can make a venv, installing it where there is none.
find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11; do
    if command -v "$name" > /dev/null &&
      "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2> /dev/null; then
      if ! "$name" -c 'import ensurepip, venv' 2> /dev/null; then
        apt_install "$("$name" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')" >&2
      fi
      command -v "$name"
      return
    fi
  done
  apt_install python3 python3-venv >&2
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "vLLM needs Python 3.11 or newer; this system offers $(python3 --version)"
  command -v python3
}
