/* What PyTorch's caching allocator asks of libcudart, over the stand-in driver. Preloaded, it
 * comes before the real libcudart, which PyTorch loads for all the rest and which cannot run on a
 * stand-in. No kernel can be launched: tensors are allocated and freed, no more. */
#include "fakecuda.h"

#include <cuda_runtime_api.h>
#include <string.h>

#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo

/* What a device without a set capacity says it has. */
#define ROOMY ((size_t)64 << 30)

static _Thread_local int current;

cudaError_t cudaGetDeviceCount(int *count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
  *device = current;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  current = device;
  return cudaSuccess;
}

cudaError_t cudaGetLastError(void) { return cudaSuccess; }

cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }

cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  (void)attribute;
  (void)device;
  *value = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  (void)device;
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "stand-in");
  properties->major = 9;
  properties->multiProcessorCount = 1;
  properties->warpSize = 32;
  properties->totalGlobalMem = ROOMY;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  *total = fakecuda_capacity() != 0 ? (size_t)fakecuda_capacity() : ROOMY;
  *available = *total - (size_t)fakecuda_physical_bytes();
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t size) {
  CUdeviceptr address = 0;
  if (cuMemAlloc(&address, size) != CUDA_SUCCESS) return cudaErrorMemoryAllocation;
  *pointer = (void *)(uintptr_t)address;
  return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
  return (cudaError_t)cuMemFree((CUdeviceptr)(uintptr_t)pointer);
}

cudaError_t cudaDeviceSynchronize(void) {
  return (cudaError_t)fakecuda_synchronize_device(current);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  (void)stream;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  (void)stream;
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
  (void)stream;
  (void)graph;
  (void)dependencies;
  (void)edges;
  *status = cudaStreamCaptureStatusNone;
  if (id != NULL) *id = 0;
  if (count != NULL) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  (void)mode;
  return cudaSuccess;
}
