/* As much of HIP as cumem_allocator_compat.h asks for, on top of the stand-in driver: so that the
 * allocator's ROCm branch, where a block has several chunks, compiles and runs.
 *
 * The compat header defines cuMemMap and the like itself, and exports them; so the stand-in's are
 * looked up in its own library, never by name alone.
 */
#ifndef FAKECUDA_HIP_RUNTIME_API_H
#define FAKECUDA_HIP_RUNTIME_API_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum hipError_t {
  hipSuccess = 0,
  hipErrorOutOfMemory = 2,
  hipErrorNotSupported = 801
} hipError_t;
typedef void *hipDeviceptr_t;
typedef struct hipCtx *hipCtx_t;
typedef struct hipStream *hipStream_t;
typedef struct hipMemory *hipMemGenericAllocationHandle_t;

typedef enum { hipMemAllocationTypePinned = 1 } hipMemAllocationType;
typedef enum { hipMemLocationTypeDevice = 1 } hipMemLocationType;
typedef enum { hipMemAccessFlagsProtReadWrite = 3 } hipMemAccessFlags;
typedef enum { hipMemAllocationGranularityMinimum = 0 } hipMemAllocationGranularity_flags;

typedef struct {
  hipMemLocationType type;
  int id;
} hipMemLocation;
typedef struct {
  hipMemAllocationType type;
  int requestedHandleType;
  hipMemLocation location;
  void *win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
} hipMemAllocationProp;
typedef struct {
  hipMemLocation location;
  hipMemAccessFlags flags;
} hipMemAccessDesc;

static inline void *fakehip_symbol(const char *name) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void *symbol = driver != NULL ? dlsym(driver, name) : NULL;
  if (symbol == NULL) {
    fprintf(stderr, "the stand-in driver is not loaded, or has no %s\n", name);
    abort();
  }
  return symbol;
}
#define FAKEHIP(name, ...) ((hipError_t(*)(__VA_ARGS__))fakehip_symbol(name))

static inline const char *hipGetErrorString(hipError_t error) {
  const char *text = NULL;
  FAKEHIP("cuGetErrorString", int, const char **)(error, &text);
  return text != NULL ? text : "unknown error";
}
static inline hipError_t hipCtxGetCurrent(hipCtx_t *context) {
  return FAKEHIP("cuCtxGetCurrent", hipCtx_t *)(context);
}
static inline hipError_t hipCtxSetCurrent(hipCtx_t context) {
  return FAKEHIP("cuCtxSetCurrent", hipCtx_t)(context);
}
static inline hipError_t hipDevicePrimaryCtxRetain(hipCtx_t *context, int device) {
  return FAKEHIP("cuDevicePrimaryCtxRetain", hipCtx_t *, int)(context, device);
}
static inline hipError_t hipMemAddressFree(hipDeviceptr_t pointer, size_t size) {
  return FAKEHIP("cuMemAddressFree", hipDeviceptr_t, size_t)(pointer, size);
}
static inline hipError_t hipMemAddressReserve(hipDeviceptr_t *pointer, size_t size,
                                              size_t alignment, hipDeviceptr_t at,
                                              unsigned long long flags) {
  return FAKEHIP("cuMemAddressReserve", hipDeviceptr_t *, size_t, size_t, hipDeviceptr_t,
                 unsigned long long)(pointer, size, alignment, at, flags);
}
static inline hipError_t hipMemCreate(hipMemGenericAllocationHandle_t *handle, size_t size,
                                      const hipMemAllocationProp *prop,
                                      unsigned long long flags) {
  return FAKEHIP("cuMemCreate", hipMemGenericAllocationHandle_t *, size_t,
                 const hipMemAllocationProp *, unsigned long long)(handle, size, prop, flags);
}
static inline hipError_t hipMemGetAllocationGranularity(size_t *granularity,
                                                        const hipMemAllocationProp *prop,
                                                        hipMemAllocationGranularity_flags option) {
  return FAKEHIP("cuMemGetAllocationGranularity", size_t *, const hipMemAllocationProp *,
                 int)(granularity, prop, option);
}
static inline hipError_t hipMemMap(hipDeviceptr_t pointer, size_t size, size_t offset,
                                   hipMemGenericAllocationHandle_t handle,
                                   unsigned long long flags) {
  return FAKEHIP("cuMemMap", hipDeviceptr_t, size_t, size_t, hipMemGenericAllocationHandle_t,
                 unsigned long long)(pointer, size, offset, handle, flags);
}
static inline hipError_t hipMemRelease(hipMemGenericAllocationHandle_t handle) {
  return FAKEHIP("cuMemRelease", hipMemGenericAllocationHandle_t)(handle);
}
static inline hipError_t hipMemSetAccess(hipDeviceptr_t pointer, size_t size,
                                         const hipMemAccessDesc *desc, size_t count) {
  return FAKEHIP("cuMemSetAccess", hipDeviceptr_t, size_t, const hipMemAccessDesc *,
                 size_t)(pointer, size, desc, count);
}
/* Mapped memory is memory of the process; what is not mapped faults, as it should. */
static inline hipError_t hipMemset(void *pointer, int value, size_t size) {
  memset(pointer, value, size);
  return hipSuccess;
}
static inline hipError_t hipMemUnmap(hipDeviceptr_t pointer, size_t size) {
  return FAKEHIP("cuMemUnmap", hipDeviceptr_t, size_t)(pointer, size);
}

#endif
