#!/bin/sh
# The runs of tests.gpu.walk on a host that is reached only by commands of limited length, and whose
# files do not outlive an idle minute:
#
#     sh lease.sh keep CARRIED FOLDER     some of a payload's files, out of the way of the next
#     sh lease.sh start OUT WORDS...      tests.gpu.walk WORDS --out OUT, which goes on afterwards
#     sh lease.sh unpack FOLDER TARGET    once all of a payload is in FOLDER, which is deleted
#     sh lease.sh watch OUT SECONDS FILE  print the progress once the walk is SECONDS old or ended,
#                                         and pack its reports and the ends of its logs
#
# The walk is of a copy of this checkout: a later command may bring another one.
set -eu

here=$(cd "$(dirname "$0")/../.." && pwd)
verb=${1:-}
[ $# -eq 0 ] || shift

case $verb in
keep)
  mkdir -p "$2"
  mv "$1"/* "$2"/
  ls "$2"
  ;;
unpack)
  sh "$1/unpack.sh" "$2"
  rm -rf "$1"
  ;;
start)
  out=$1
  shift
  mkdir -p "$out"
  cp -a "$here" "$out/checkout"
  date +%s >"$out/began"
  cd "$out/checkout"
  PYTHONPATH=scripts setsid python3 -m tests.gpu.walk "$@" --out "$out" \
    >"$out/walk.log" 2>&1 </dev/null &
  echo $! >"$out/pid"
  ;;
watch)
  out=$1 seconds=$2 file=$3
  pid=$(cat "$out/pid") began=$(cat "$out/began")
  while kill -0 "$pid" 2>/dev/null && [ $(($(date +%s) - began)) -lt "$seconds" ]; do
    sleep 1
  done
  cat "$out/walk.log"
  ends=$(mktemp -d)
  for log in "$out"/*.txt "$out"/*.log; do
    [ ! -f "$log" ] || tail -c 60000 "$log" >"$ends/${log##*/}"
  done
  cp "$out"/*.json "$ends"/ 2>/dev/null || :
  tar -C "$ends" -czf "$file" .
  rm -r "$ends"
  ;;
*)
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
  exit 2
  ;;
esac
