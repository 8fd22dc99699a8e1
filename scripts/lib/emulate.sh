#!/usr/bin/env bash
# Makes this x86_64 machine run programs for aarch64, through qemu's user emulation. Needs root.
#
#   scripts/lib/emulate.sh        registers qemu-aarch64-static with binfmt_misc where nobody has
#
# A machine that is aarch64 already needs no emulator. Also sourced, for emulate_aarch64.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  # shellcheck source=scripts/lib/common.sh
  source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
fi

emulate_aarch64() {
  local misc=/proc/sys/fs/binfmt_misc name=qemu-aarch64 magic mask
  [ "$(uname -m)" != aarch64 ] || return 0
  command -v qemu-aarch64-static > /dev/null || apt_install qemu-user-static
  [ -e $misc/register ] || mount -t binfmt_misc none $misc 2> /dev/null ||
    die "binfmt_misc cannot be mounted: this kernel or sandbox runs no foreign programs"
  if [ ! -e $misc/$name ]; then
    # 64-bit little-endian ELF for machine 183. F: the emulator is opened now and works in any root.
    magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
    mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
    printf '%s' ":$name:M::$magic:$mask:/usr/bin/qemu-aarch64-static:OCF" > $misc/register ||
      die "qemu-aarch64 cannot be registered with binfmt_misc"
  fi
}

[ "${BASH_SOURCE[0]}" != "$0" ] || emulate_aarch64
