#!/usr/bin/env bash
# Prints a folder with a dockerd that knows CDI devices, for tests/docker/test_cdi.py: the machine's own
# where it is new enough, else Debian 13's, 23 MB from the Debian mirror, kept in .venv/engine. Nothing
# is installed, and the machine's package lists stay as they are.
set -euo pipefail
# shellcheck source=scripts/lib/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=scripts/lib/debian13.sh
source "$checkout/scripts/lib/debian13.sh"
PATH="$PATH:/usr/sbin:/sbin"
oldest=25

release() { "$1" --version | sed -E 's/^Docker version ([0-9]+).*/\1/'; }

for found in "$venv/engine/dockerd" "$(command -v dockerd || true)"; do
  if [ -x "$found" ] && [ "$(release "$found")" -ge "$oldest" ]; then
    dirname "$found"
    exit 0
  fi
done
debian13_program docker.io usr/sbin/dockerd "$venv/engine/dockerd"
echo "$venv/engine"
