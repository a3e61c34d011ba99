/* The part of libcudart that vLLM's CudaRTLibrary looks up, on top of the stand-in driver: the
 * real one asks the driver for far more than a stand-in can have. */
#include "fakecuda.h"

#include <stdatomic.h>
#include <stdio.h>

#ifndef FAKECUDA_WITH_CUDA_H
CUresult cuMemAlloc(CUdeviceptr *pointer, size_t size);
CUresult cuMemFree(CUdeviceptr pointer);
CUresult cuGetErrorString(CUresult error, const char **text);
#endif

typedef struct {
  char bytes[64];
} ipc_handle;

/* cudaMemcpyAttributes */
typedef struct {
  int order;
  int hints[4];
  unsigned int flags;
} copy_attributes;

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
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream);
int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                      size_t height, int kind, void *stream);
int cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *sizes, size_t count,
                         const copy_attributes *attributes, const size_t *begins, size_t kinds,
                         void *stream);
int cudaRuntimeGetVersion(int *version);
int cudaStreamCreateWithFlags(void **stream, unsigned int flags);
int cudaStreamSynchronize(void *stream);
int cudaDeviceGetAttribute(int *value, int attribute, int device);
int cudaDeviceGetPCIBusId(char *text, int size, int device);
int cudaThreadExchangeStreamCaptureMode(int *mode);

static _Thread_local int current;
/* cudaStreamCaptureModeGlobal is a thread's mode at first, cudaStreamCaptureModeRelaxed is 2. */
static _Thread_local int capture_mode;
/* The device of each stream; a stream is the address of its entry. */
static int stream_devices[1 << 16];
static atomic_int streams;

/* cudaErrorStreamCaptureUnsupported */
static int unsafe(void) { return fakecuda_is_capturing() && capture_mode != 2 ? 900 : 0; }

/* Count the call of a function that creates a context on the thread's device where it has none. */
static int enter_context(const char *function) {
  fakecuda_use_context(current);
  return fakecuda_enter(function);
}

int cudaSetDevice(int device) {
  int result = fakecuda_enter("cudaSetDevice");
  if (result != 0) return result;
  if (device < 0 || device >= FAKECUDA_DEVICES) return CUDA_ERROR_INVALID_DEVICE;
  current = device;
  fakecuda_use_context(current);
  return 0;
}

int cudaDeviceSynchronize(void) {
  int result = enter_context("cudaDeviceSynchronize");
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
  int result = enter_context("cudaMemcpy");
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

int cudaHostRegister(void *pointer, size_t size, unsigned int flags) {
  int result = enter_context("cudaHostRegister");
  if (result == 0) result = unsafe();
  if (result == 0 && flags > 15) result = CUDA_ERROR_INVALID_VALUE;
  return result != 0 ? result : fakecuda_register_host((uint64_t)(uintptr_t)pointer, size);
}

int cudaHostUnregister(void *pointer) {
  int result = enter_context("cudaHostUnregister");
  return result != 0 ? result : fakecuda_unregister_host((uint64_t)(uintptr_t)pointer);
}

int cudaStreamCreateWithFlags(void **stream, unsigned int flags) {
  int result = enter_context("cudaStreamCreateWithFlags");
  if (result == 0) result = unsafe();
  if (result == 0 && flags > 1) result = CUDA_ERROR_INVALID_VALUE;
  if (result != 0) return result;
  int i = atomic_fetch_add(&streams, 1);
  if (i >= 1 << 16) return CUDA_ERROR_OUT_OF_MEMORY;
  stream_devices[i] = current;
  *stream = &stream_devices[i];
  return 0;
}

int cudaStreamSynchronize(void *stream) {
  int result = enter_context("cudaStreamSynchronize");
  if (result == 0) result = unsafe();
  if (result == 0) fakecuda_synchronize_stream(stream);
  return result;
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  int result = enter_context("cudaMemcpyAsync");
  if (result != 0) return result;
  if (kind < 0 || kind > 4) return 21; /* cudaErrorInvalidMemcpyDirection */
  if (stream == NULL) return CUDA_ERROR_INVALID_VALUE; /* the default stream: not stood in for */
  return fakecuda_copy_async((uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, size,
                             *(int *)stream, stream);
}

/* Rows are copied as so many copies, which end together. */
int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                      size_t height, int kind, void *stream) {
  int result = enter_context("cudaMemcpy2DAsync");
  if (result != 0) return result;
  if (kind < 0 || kind > 4) return 21; /* cudaErrorInvalidMemcpyDirection */
  if (stream == NULL || width == 0 || height == 0) return CUDA_ERROR_INVALID_VALUE;
  size_t most = (size_t)INT32_MAX;
  if (to_pitch < width || from_pitch < width || to_pitch > most || from_pitch > most) {
    return 12; /* cudaErrorInvalidPitchValue */
  }
  for (size_t row = 0; result == 0 && row < height; ++row) {
    result = fakecuda_copy_async((uint64_t)(uintptr_t)to + row * to_pitch,
                                 (uint64_t)(uintptr_t)from + row * from_pitch, width,
                                 *(int *)stream, stream);
  }
  return result;
}

/* As of CUDA 13.0. The one kind of copies is ordered as the stream is. */
int cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *sizes, size_t count,
                         const copy_attributes *attributes, const size_t *begins, size_t kinds,
                         void *stream) {
  int result = enter_context("cudaMemcpyBatchAsync");
  if (result != 0) return result;
  if (stream == NULL || count == 0 || kinds != 1 || begins[0] != 0 || attributes->order != 1 ||
      attributes->flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t i = 0; result == 0 && i < count; ++i) {
    result = sizes[i] == 0 ? CUDA_ERROR_INVALID_VALUE
                           : fakecuda_copy_async((uint64_t)(uintptr_t)to[i],
                                                 (uint64_t)(uintptr_t)from[i], sizes[i],
                                                 *(int *)stream, stream);
  }
  return result;
}

int cudaRuntimeGetVersion(int *version) {
  int result = fakecuda_enter("cudaRuntimeGetVersion");
  if (result == 0) *version = 13000;
  return result;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  int result = fakecuda_enter("cudaDeviceGetAttribute");
  if (result == 0 && (device < 0 || device >= FAKECUDA_DEVICES)) result = CUDA_ERROR_INVALID_DEVICE;
  if (result == 0) *value = fakecuda_attribute(attribute);
  return result;
}

/* An address at which no machine has a device. */
int cudaDeviceGetPCIBusId(char *text, int size, int device) {
  int result = fakecuda_enter("cudaDeviceGetPCIBusId");
  if (result == 0 && (device < 0 || device >= FAKECUDA_DEVICES)) result = CUDA_ERROR_INVALID_DEVICE;
  if (result == 0) snprintf(text, (size_t)size, "FFFF:FF:%02X.0", 0x1f - device);
  return result;
}

int cudaThreadExchangeStreamCaptureMode(int *mode) {
  int result = fakecuda_enter("cudaThreadExchangeStreamCaptureMode");
  if (result == 0) {
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
  }
  return result;
}

int cudaGetLastError(void) { return fakecuda_enter("cudaGetLastError"); }
