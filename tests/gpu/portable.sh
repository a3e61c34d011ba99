#!/bin/sh
# The proof of the portable kernels of DeepSeek V4 and V4.1 on 0.33.0, on two GPUs of 9.0, in the
# parts that one lease has time for (seconds were measured on two H200, but for PP: 100 s each):
#
#     sh portable.sh first TARGET OUT     380 s  V4 and V4.1, each on a GPU: all others find compiled
#     sh portable.sh v4 TARGET OUT        570 s  V4 stock, MTP, without DeepGEMM, TP, PP
#     sh portable.sh v41 TARGET OUT       300 s  V4.1 stock, TP, PP
#     sh portable.sh kernels TARGET OUT   110 s  witnesses on the GPU, 10,000 shapes, sanitizer, times
#     sh portable.sh list                        the runs of each part, for tests.gpu.walk --only
#
# Times mean something only where no server starts meanwhile: `kernels` comes last.
#
# TARGET is where unpack.sh of tests.gpu.payload put 0.33.0. Every run is one of tests.gpu.walk: OUT
# gets its report, `against` has stock beside portable, and lease.sh starts and watches a walk that
# outlives its command:
#
#     sh lease.sh start OUT 0.33.0=TARGET --gpus 2 --only $(sh portable.sh list v4)
#
# Servers write a sleep, a refused wake-up and a wake-up into their reports; `wrong` must be empty.
set -eu

here=$(cd "$(dirname "$0")/../.." && pwd)
kernels="33-kernels 33-random 33-sanitizer 33-sparse-mla 33-deepgemm"
first="33-v4-portable 33-v41-portable"
v4="33-v4-graphs 33-v4-no-deepgemm 33-v4-absent 33-v4-mtp 33-v4-first-stage 33-v4-tp2 33-v4-pp2"
v41="33-v41-graphs 33-v41-tp2 33-v41-pp2"
part=${1:-}
[ "$part" != list ] || part="list ${2:-all}"

case $part in
"list kernels" | kernels) runs=$kernels ;;
"list v4" | v4) runs=$v4 ;;
"list v41" | v41) runs=$v41 ;;
"list first" | first) runs=$first ;;
"list all") runs="$first $v4 $v41 $kernels" ;;
*)
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
  exit 2
  ;;
esac

if [ "${part%% *}" = list ]; then
  echo "$runs"
  exit 0
fi
cd "$here"
# shellcheck disable=SC2086 # the runs are words
PYTHONPATH=scripts exec python3 -m tests.gpu.walk "0.33.0=$2" --out "$3" --gpus 2 --only $runs
