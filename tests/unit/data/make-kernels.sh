#!/bin/sh
# Makes kernels.so, the real library the audit's unit tests read: three translation units compiled
# by nvcc 13.0.88 (CUDA_HOME) and linked without a C runtime to keep it small.
#   one   sm_90a, sm_120f, PTX compute_80      two   sm_120a, sm_121a, PTX compute_90a
#   three sm_120, PTX compute_120
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unit() {
    name=$1
    shift
    echo "__global__ void $name(float *x) { *x += 1; } void run_$name(float *x) { $name<<<1, 1>>>(x); }" \
        > "$work/$name.cu"
    "$CUDA_HOME/bin/nvcc" -Xfatbin --compress-all -Xcompiler -fPIC "$@" -c "$work/$name.cu" -o "$work/$name.o"
}
to() { printf -- '-gencode=arch=compute_%s,code=%s' "$1" "$2"; }
unit one "$(to 90a sm_90a)" "$(to 120f sm_120f)" "$(to 80 compute_80)"
unit two "$(to 120a sm_120a)" "$(to 121a sm_121a)" "$(to 90a compute_90a)"
unit three "$(to 120 sm_120)" "$(to 120 compute_120)"
cc -shared -nostdlib -s -Wl,-z,noseparate-code,--build-id=none,--unresolved-symbols=ignore-all \
    -o kernels.so "$work/one.o" "$work/two.o" "$work/three.o"
