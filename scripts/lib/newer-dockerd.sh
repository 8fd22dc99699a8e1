#!/usr/bin/env bash
# Prints a folder with a dockerd that knows CDI devices, for tests/docker/test_cdi.py: the machine's own
# where it is new enough, else Debian 13's, 23 MB from the Debian mirror, kept in .venv/engine. Nothing
# is installed, and the machine's package lists stay as they are.
set -euo pipefail
# shellcheck source=scripts/lib/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
PATH="$PATH:/usr/sbin:/sbin"
oldest=25

release() { "$1" --version | sed -E 's/^Docker version ([0-9]+).*/\1/'; }

for found in "$venv/engine/dockerd" "$(command -v dockerd || true)"; do
  if [ -x "$found" ] && [ "$(release "$found")" -ge "$oldest" ]; then
    dirname "$found"
    exit 0
  fi
done
command -v apt-get dpkg-deb > /dev/null || die "there is no apt-get here to fetch an engine with"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keys" ] || die "$keys is not there (package debian-archive-keyring)"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
echo "deb [signed-by=$keys] http://deb.debian.org/debian trixie main" > "$work/sources.list"
apt() {
  apt-get -qq -o APT::Sandbox::User=root -o "Dir::Etc::sourcelist=$work/sources.list" \
    -o Dir::Etc::sourceparts=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
    -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" \
    -o Dir::State::status=/dev/null "$@"
}
apt update > /dev/null || die "no network: the Debian mirror cannot be reached"
(cd "$work" && apt download docker.io > /dev/null)
dpkg-deb --fsys-tarfile "$work"/docker.io_*.deb | tar -x -C "$work" ./usr/sbin/dockerd
"$work/usr/sbin/dockerd" --version > /dev/null || die "Debian 13's dockerd does not run here"
mkdir -p "$venv/engine"
mv "$work/usr/sbin/dockerd" "$venv/engine/dockerd"
echo "$venv/engine"
