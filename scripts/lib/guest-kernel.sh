#!/usr/bin/env bash
# Prints the path of a Debian cloud kernel for the QEMU guest of tests/qemu, fetching it where there is
# none: 27 MB from the Debian mirror, of which the 8 MB kernel is kept in .venv/guest. Nothing is
# installed.
set -euo pipefail
# shellcheck source=scripts/lib/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

for found in "$venv"/guest/vmlinuz-* /boot/vmlinuz-*-cloud-amd64; do
  if [ -r "$found" ]; then
    echo "$found"
    exit 0
  fi
done
command -v apt-get dpkg-deb > /dev/null || die "there is no apt-get here to fetch a kernel with"
if ! apt-cache show linux-image-cloud-amd64 > /dev/null 2>&1; then
  if [ "$(id -u)" -eq 0 ]; then apt-get update -qq; else sudo -n apt-get update -qq; fi
fi
name=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image-/ {print $2; exit}')
[ -n "$name" ] || die "this system's package lists have no linux-image-cloud-amd64"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$work" && apt-get download -qq -o APT::Sandbox::User=root "$name" > /dev/null)
dpkg-deb --fsys-tarfile "$work"/*.deb | tar -x -C "$work" --wildcards './boot/vmlinuz-*'
mkdir -p "$venv/guest"
kernel=$(echo "$work"/boot/vmlinuz-*)
mv "$kernel" "$venv/guest/"
echo "$venv/guest/$(basename "$kernel")"
