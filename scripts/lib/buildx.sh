#!/usr/bin/env bash
# Prints the path of a docker-buildx program: this machine's own where it has one, else Debian 13's
# (Debian 12 has none), kept in build/tools: 23 MB to fetch, once.
set -euo pipefail
# shellcheck source=scripts/lib/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=scripts/lib/debian13.sh
source "$checkout/scripts/lib/debian13.sh"

own="$checkout/build/tools/docker-buildx"
for place in "$HOME/.docker" /usr/local/{lib,libexec}/docker /usr/{lib,libexec}/docker; do
  if [ -x "$place/cli-plugins/docker-buildx" ]; then
    printf '%s\n' "$place/cli-plugins/docker-buildx"
    exit 0
  fi
done
[ -x "$own" ] || debian13_program docker-buildx usr/libexec/docker/cli-plugins/docker-buildx "$own"
printf '%s\n' "$own"
