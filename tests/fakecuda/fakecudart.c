/* The part of libcudart that vLLM's CudaRTLibrary looks up, on top of the stand-in driver: the
 * real one asks the driver for far more than a stand-in can have. */
#include "fakecuda.h"

#ifndef FAKECUDA_WITH_CUDA_H
CUresult cuMemAlloc(CUdeviceptr *pointer, size_t size);
CUresult cuMemFree(CUdeviceptr pointer);
CUresult cuGetErrorString(CUresult error, const char **text);
#endif

typedef struct {
  char bytes[64];
} ipc_handle;

int cudaSetDevice(int device);
int cudaDeviceSynchronize(void);
int cudaDeviceReset(void);
const char *cudaGetErrorString(int error);
int cudaMalloc(void **pointer, size_t size);
int cudaFree(void *pointer);
int cudaMemset(void *pointer, int value, size_t size);
int cudaMemcpy(void *to, const void *from, size_t size, int kind);
int cudaIpcGetMemHandle(ipc_handle *handle, void *pointer);
int cudaIpcOpenMemHandle(void **pointer, ipc_handle handle, unsigned int flags);
int cudaHostRegister(void *pointer, size_t size, unsigned int flags);
int cudaHostUnregister(void *pointer);
int cudaGetLastError(void);

static _Thread_local int current;

int cudaSetDevice(int device) {
  int result = fakecuda_enter("cudaSetDevice");
  if (result != 0) return result;
  if (device < 0 || device >= FAKECUDA_DEVICES) return CUDA_ERROR_INVALID_DEVICE;
  current = device;
  return 0;
}

int cudaDeviceSynchronize(void) {
  int result = fakecuda_enter("cudaDeviceSynchronize");
  return result != 0 ? result : fakecuda_synchronize_device(current);
}

int cudaDeviceReset(void) { return fakecuda_enter("cudaDeviceReset"); }

const char *cudaGetErrorString(int error) {
  const char *text = "unrecognized error code";
  cuGetErrorString((CUresult)error, &text);
  return text != NULL ? text : "unrecognized error code";
}

int cudaMalloc(void **pointer, size_t size) {
  CUdeviceptr address = 0;
  int result = fakecuda_enter("cudaMalloc");
  if (result == 0) result = (int)cuMemAlloc(&address, size);
  if (result == 0) *pointer = (void *)(uintptr_t)address;
  return result;
}

int cudaFree(void *pointer) {
  int result = fakecuda_enter("cudaFree");
  if (result != 0 || pointer == NULL) return result;
  return (int)cuMemFree((CUdeviceptr)(uintptr_t)pointer);
}

int cudaMemset(void *pointer, int value, size_t size) {
  int result = fakecuda_enter("cudaMemset");
  return result != 0 ? result : fakecuda_fill((uint64_t)(uintptr_t)pointer, value, size);
}

int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
  int result = fakecuda_enter("cudaMemcpy");
  if (result != 0) return result;
  if (kind < 0 || kind > 4) return 21; /* cudaErrorInvalidMemcpyDirection */
  return fakecuda_copy((uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, size);
}

/* Sharing between processes is not stood in for. */
int cudaIpcGetMemHandle(ipc_handle *handle, void *pointer) {
  (void)handle;
  (void)pointer;
  int result = fakecuda_enter("cudaIpcGetMemHandle");
  return result != 0 ? result : CUDA_ERROR_NOT_SUPPORTED;
}

int cudaIpcOpenMemHandle(void **pointer, ipc_handle handle, unsigned int flags) {
  (void)pointer;
  (void)handle;
  (void)flags;
  int result = fakecuda_enter("cudaIpcOpenMemHandle");
  return result != 0 ? result : CUDA_ERROR_NOT_SUPPORTED;
}

/* All host memory is as good as pinned. */
int cudaHostRegister(void *pointer, size_t size, unsigned int flags) {
  (void)pointer;
  (void)size;
  (void)flags;
  return fakecuda_enter("cudaHostRegister");
}

int cudaHostUnregister(void *pointer) {
  (void)pointer;
  return fakecuda_enter("cudaHostUnregister");
}

int cudaGetLastError(void) { return fakecuda_enter("cudaGetLastError"); }
