#!/usr/bin/env bash
# Makes this x86_64 machine run programs for aarch64, through qemu's user emulation. Needs root.
#
#   scripts/lib/emulate.sh        registers an emulator with binfmt_misc where none of ours is
#
# torch 2.14's aarch64 build crashes when Debian 12's qemu 7.2 loads it and runs under 10.0, so an older
# one than 10 gives way to Debian 13's, kept in build/tools. What is registered last is asked first; the
# machine's own stays. A machine that is aarch64 needs none. Also sourced, for emulate_aarch64.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  # shellcheck source=scripts/lib/common.sh
  source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
fi
# shellcheck source=scripts/lib/debian13.sh
source "$checkout/scripts/lib/debian13.sh"

emulate_aarch64() {
  local misc=/proc/sys/fs/binfmt_misc name=exl3-aarch64 magic mask emulator
  [ "$(uname -m)" != aarch64 ] || return 0
  [ -e $misc/register ] || mount -t binfmt_misc none $misc 2> /dev/null ||
    die "binfmt_misc cannot be mounted: this kernel or sandbox runs no foreign programs"
  [ ! -e $misc/$name ] || return 0
  emulator=$(command -v qemu-aarch64-static || true)
  if [ -z "$emulator" ] || [ "$("$emulator" --version | sed -nE '1s/.*version ([0-9]+).*/\1/p')" -lt 10 ]; then
    emulator="$checkout/build/tools/qemu-aarch64"
    [ -x "$emulator" ] || debian13_program qemu-user usr/bin/qemu-aarch64 "$emulator"
  fi
  # 64-bit little-endian ELF for machine 183. F: the emulator is opened now and works in any root.
  magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
  mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
  printf '%s' ":$name:M::$magic:$mask:$emulator:OCF" > $misc/register ||
    die "qemu-aarch64 cannot be registered with binfmt_misc"
}

[ "${BASH_SOURCE[0]}" != "$0" ] || emulate_aarch64
