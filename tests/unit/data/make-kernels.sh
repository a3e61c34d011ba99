#!/bin/sh
# Makes the real files that the audit's unit tests read, with no C runtime in them to keep them small.
# kernels.so is of nvcc 13.0.88 (CUDA_HOME), three translation units:
#   one   sm_90a, sm_120f, PTX compute_80      two   sm_120a, sm_121a, PTX compute_90a
#   three sm_120, PTX compute_120
# With the argument `more`, the others, of nvcc 13.5.37, each of one kernel or two:
#   concat.so, concat.fatbin   sm_90 and PTX compute_120, sm_100a and sm_120 concatenated
#   lto.fatbin                 sm_120, LTO-IR of compute_120
#   stub.so                    host code, and the device-link stub
#   unlinked.so, libk.a        two units of -rdc=true for sm_120, not linked for the device
#   k120a.cubin, k121f.cubin, k90a.ptx
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
nvcc() { "$CUDA_HOME/bin/nvcc" "-I$CUDA_HOME/include" "-L$CUDA_HOME/lib" -Xcompiler -fPIC "$@"; }
unit() {
    name=$1
    shift
    echo "__global__ void $name(float *x) { *x += 1; } void run_$name(float *x) { $name<<<1, 1>>>(x); }" \
        > "$work/$name.cu"
    nvcc -Xfatbin --compress-all "$@" -c "$work/$name.cu" -o "$work/$name.o"
}
to() { printf -- '-gencode=arch=compute_%s,code=%s' "$1" "$2"; }
link() {
    cc -shared -nostdlib -s -Wl,-z,noseparate-code,--build-id=none,--unresolved-symbols=ignore-all -o "$@"
}
if [ "${1:-}" != more ]; then
    unit one "$(to 90a sm_90a)" "$(to 120f sm_120f)" "$(to 80 compute_80)"
    unit two "$(to 120a sm_120a)" "$(to 121a sm_121a)" "$(to 90a compute_90a)"
    unit three "$(to 120 sm_120)" "$(to 120 compute_120)"
    link kernels.so "$work/one.o" "$work/two.o" "$work/three.o"
    exit
fi
set -- "$(to 90 sm_90)" "$(to 100a sm_100a)" "$(to 120 '[sm_120,compute_120]')"
unit k "$@" -concat
link concat.so "$work/k.o"
nvcc -fatbin "$@" -concat "$work/k.cu" -o concat.fatbin
nvcc -fatbin -rdc=true -gencode "arch=compute_120,code=[sm_120,lto_120]" "$work/k.cu" -o lto.fatbin
echo '__device__ void o(float *x) { *x = 1; }' > "$work/o.cu"
echo 'extern __device__ void o(float *); __global__ void k2(float *x) { o(x); }' > "$work/d.cu"
for name in o d; do nvcc -rdc=true -arch=sm_120 -c "$work/$name.cu" -o "$work/$name.o"; done
link unlinked.so "$work/o.o" "$work/d.o"
echo 'int host(void) { return 1; }' > "$work/plain.c"
cc -fPIC -c "$work/plain.c" -o "$work/plain.o"
strip -g "$work/o.o" "$work/d.o"
rm -f libk.a
ar rcD libk.a "$work/o.o" "$work/d.o" "$work/plain.o"
nvcc -dlink "$work/plain.o" -o "$work/stub.o"
link stub.so "$work/plain.o" "$work/stub.o"
for arch in 120a 121f; do nvcc -cubin -arch=sm_$arch "$work/k.cu" -o k$arch.cubin; done
nvcc -ptx -arch=compute_90a "$work/k.cu" -o k90a.ptx
