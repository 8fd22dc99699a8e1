#!/usr/bin/env bash
# A private Docker engine for tests: its own data, socket and containerd below one folder.
#
#   scripts/lib/dockerd.sh start DIR [DOCKERD-ARG...]   prints unix://DIR/docker.sock
#   scripts/lib/dockerd.sh stop DIR                     ends it with its containers; data stay
#   scripts/lib/dockerd.sh remove DIR                   stop, then delete DIR
#
# Nothing outside DIR is touched: no iptables rules, no docker0 bridge, no /etc/docker. Containers
# therefore run with --network host or none. Needs root. A start on a running engine prints its
# socket and changes nothing, so that several tests can share one DIR. EXL3_DOCKER_STORAGE names a
# storage driver (default: the engine's choice).
set -euo pipefail
# shellcheck source=scripts/lib/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() { die "usage: dockerd.sh start|stop|remove DIR [DOCKERD-ARG...]"; }

[ $# -ge 2 ] || usage
action=$1
dir=$(realpath -m "$2")
shift 2
socket="$dir/docker.sock"

# A pid counts as ours only while its command line names our pid file: pids are used again.
running() {
  local pid
  pid=$(cat "$dir/pid" 2> /dev/null) || return 1
  tr '\0' '\n' 2> /dev/null < "/proc/$pid/cmdline" | grep -qxF -- "$dir/pid"
}

answers() { curl -sf --max-time 2 --unix-socket "$socket" http://docker/_ping > /dev/null; }

start() {
  [ "$(id -u)" -eq 0 ] || die "a Docker engine needs root"
  [ ${#socket} -le 100 ] || die "$socket is too long for a socket's address: use a shorter folder"
  for needed in dockerd:docker.io runc:docker.io iptables:iptables curl:curl; do
    command -v "${needed%%:*}" > /dev/null || PATH="$PATH:/usr/sbin" apt_install "${needed##*:}" >&2
  done
  export PATH="$PATH:/usr/sbin:/sbin"
  mkdir -p "$dir"
  exec 8> "$dir/lock"
  flock 8
  if ! running; then
    local storage=()
    [ -z "${EXL3_DOCKER_STORAGE:-}" ] || storage=(--storage-driver "$EXL3_DOCKER_STORAGE")
    rm -f "$dir/pid" "$socket"
    # An empty configuration file: the machine's own /etc/docker/daemon.json is not ours to obey.
    [ -e "$dir/daemon.json" ] || echo '{}' > "$dir/daemon.json"
    setsid dockerd --config-file "$dir/daemon.json" --data-root "$dir/data" \
      --exec-root "$dir/exec" -p "$dir/pid" -H "unix://$socket" --iptables=false \
      --ip6tables=false --ip-forward=false --bridge=none "${storage[@]}" "$@" \
      < /dev/null >> "$dir/log" 2>&1 8>&- &
    local started=$!
    for _ in $(seq 240); do
      answers && break
      kill -0 "$started" 2> /dev/null || break
      sleep 0.25
    done
  fi
  answers || {
    tail -n 20 "$dir/log" >&2
    die "the Docker engine below $dir does not answer; its log is $dir/log"
  }
  printf 'unix://%s\n' "$socket"
}

stop() {
  if running; then
    local pid
    pid=$(cat "$dir/pid")
    kill -TERM "$pid"
    for _ in $(seq 240); do
      running || break
      sleep 0.25
    done
    running && die "the Docker engine $pid below $dir does not end"
  fi
  rm -f "$dir/pid" "$socket"
  # What an engine that was killed left mounted, the deepest first.
  local mount
  grep -F " $dir/" /proc/mounts | cut -d' ' -f2 | sort -r | while read -r mount; do
    umount "$mount" || true
  done
}

case "$action" in
  start) start "$@" ;;
  stop) stop ;;
  remove)
    stop
    rm -rf -- "$dir"
    ;;
  *) usage ;;
esac
