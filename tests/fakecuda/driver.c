/* The driver's own interface: the cu* functions that the allocator and the stand-in for
 * libcudart call. What they do to memory is in model.c. */
#include "model.h"

struct CUctx_st {
  int device;
};

static struct CUctx_st primary[FAKECUDA_DEVICES];
static _Thread_local CUcontext current;
static int initialized;

/* Lock, count, and leave with the planned error if there is one. */
#define ENTER(name)                                      \
  pthread_mutex_lock(&lock);                             \
  int result = enter(name);                              \
  if (result == 0 && !initialized) result = CUDA_ERROR_NOT_INITIALIZED
#define LEAVE(...)                            \
  result = done(result, __VA_ARGS__);         \
  pthread_mutex_unlock(&lock);                \
  return (CUresult)result

static int is_device(int device) { return device >= 0 && device < FAKECUDA_DEVICES; }

static int aligned(uint64_t size) { return size != 0 && size % FAKECUDA_GRANULARITY == 0; }

CUresult cuInit(unsigned int flags) {
  pthread_mutex_lock(&lock);
  int result = enter("cuInit");
  if (result == 0 && flags != 0) result = CUDA_ERROR_INVALID_VALUE;
  if (result == 0) {
    initialized = 1;
    for (int i = 0; i < FAKECUDA_DEVICES; ++i) primary[i].device = i;
  }
  LEAVE("cuInit(%u)", flags);
}

CUresult cuDeviceGetCount(int *count) {
  ENTER("cuDeviceGetCount");
  if (result == 0) *count = FAKECUDA_DEVICES;
  LEAVE("cuDeviceGetCount()");
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  ENTER("cuDeviceGet");
  if (result == 0 && !is_device(ordinal)) result = CUDA_ERROR_INVALID_DEVICE;
  if (result == 0) *device = ordinal;
  LEAVE("cuDeviceGet(%d)", ordinal);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  ENTER("cuDeviceGetAttribute");
  if (result == 0 && !is_device(device)) result = CUDA_ERROR_INVALID_DEVICE;
  if (result == 0 && (unsigned)attribute >= 256) result = CUDA_ERROR_INVALID_VALUE;
  if (result == 0) *value = attributes[attribute];
  LEAVE("cuDeviceGetAttribute(%d, device %d)", (int)attribute, device);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  ENTER("cuDevicePrimaryCtxRetain");
  if (result == 0 && !is_device(device)) result = CUDA_ERROR_INVALID_DEVICE;
  if (result == 0) *context = &primary[device];
  LEAVE("cuDevicePrimaryCtxRetain(device %d)", device);
}

/* PyTorch asks before it takes an allocation back: it is active, and its flags are the default. */
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  ENTER("cuCtxGetCurrent");
  if (result == 0) *context = current;
  LEAVE("cuCtxGetCurrent()");
}

CUresult cuCtxSetCurrent(CUcontext context) {
  ENTER("cuCtxSetCurrent");
  if (result == 0 && context != NULL && context != &primary[0] && context != &primary[1]) {
    result = CUDA_ERROR_INVALID_CONTEXT;
  }
  if (result == 0) current = context;
  LEAVE("cuCtxSetCurrent()");
}

CUresult cuCtxSynchronize(void) {
  ENTER("cuCtxSynchronize");
  if (result == 0 && current == NULL) result = CUDA_ERROR_INVALID_CONTEXT;
  if (result == 0) drain(current->device);
  LEAVE("cuCtxSynchronize()");
}

static const char *error_text(int error) {
  switch (error) {
    case CUDA_SUCCESS: return "no error";
    case CUDA_ERROR_INVALID_VALUE: return "invalid argument";
    case CUDA_ERROR_OUT_OF_MEMORY: return "out of memory";
    case CUDA_ERROR_NOT_INITIALIZED: return "initialization error";
    case CUDA_ERROR_INVALID_DEVICE: return "invalid device ordinal";
    case CUDA_ERROR_INVALID_CONTEXT: return "invalid device context";
    case CUDA_ERROR_ILLEGAL_ADDRESS: return "an illegal memory access was encountered";
    case CUDA_ERROR_NOT_PERMITTED: return "operation not permitted";
    case CUDA_ERROR_NOT_SUPPORTED: return "operation not supported";
    case CUDA_ERROR_UNKNOWN: return "unknown error";
    default: return NULL;
  }
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  ENTER("cuGetErrorString");
  /* As the driver does: no text for an unknown error, and nothing written when it fails. */
  if (result == 0) {
    *text = error_text((int)error);
    if (*text == NULL) result = CUDA_ERROR_INVALID_VALUE;
  }
  LEAVE("cuGetErrorString(%d)", (int)error);
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags option) {
  ENTER("cuMemGetAllocationGranularity");
  if (result == 0 && prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    result = CUDA_ERROR_INVALID_VALUE;
  }
  if (result == 0 && !is_device(prop->location.id)) result = CUDA_ERROR_INVALID_DEVICE;
  if (result == 0) *granularity = FAKECUDA_GRANULARITY;
  LEAVE("cuMemGetAllocationGranularity(%d)", (int)option);
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr at,
                             unsigned long long flags) {
  ENTER("cuMemAddressReserve");
  if (result == 0 && (!aligned(size) || (alignment & (alignment - 1)) != 0 || flags != 0)) {
    result = CUDA_ERROR_INVALID_VALUE;
  }
  /* `at` is a hint, followed where that range is free; a test may have it ignored. */
  if (result == 0 && at != 0 && !hints_ignored && reserve_at(at, size)) {
    *pointer = at;
  } else if (result == 0) {
    result = reserve(pointer, size, alignment, at);
  }
  LEAVE("cuMemAddressReserve(%zu, hint %#llx) -> %#llx", size, (unsigned long long)at,
        result == 0 ? (unsigned long long)*pointer : 0ull);
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
  ENTER("cuMemAddressFree");
  if (result == 0) result = release_address(pointer, size);
  LEAVE("cuMemAddressFree(%#llx, %zu)", (unsigned long long)pointer, size);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                     const CUmemAllocationProp *prop, unsigned long long flags) {
  ENTER("cuMemCreate");
  if (result == 0 && (!aligned(size) || flags != 0 || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
                      prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)) {
    result = CUDA_ERROR_INVALID_VALUE;
  }
  if (result == 0 && !is_device(prop->location.id)) result = CUDA_ERROR_INVALID_DEVICE;
  if (result == 0 && prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC &&
      !fabric_permitted) {
    result = CUDA_ERROR_NOT_PERMITTED;
  }
  if (result == 0) result = create(handle, size, prop->location.id);
  LEAVE("cuMemCreate(%zu, device %d) -> %#llx", size, prop->location.id,
        result == 0 ? (unsigned long long)*handle : 0ull);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  ENTER("cuMemRelease");
  physical *memory = physical_of(handle);
  if (result == 0 && memory == NULL) result = CUDA_ERROR_INVALID_VALUE;
  if (result == 0) {
    memory->held = 0;
    drop_if_unused(memory);
  }
  LEAVE("cuMemRelease(%#llx)", (unsigned long long)handle);
}

CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  ENTER("cuMemMap");
  physical *memory = physical_of(handle);
  if (result == 0 && (offset != 0 || flags != 0 || memory == NULL)) {
    result = CUDA_ERROR_INVALID_VALUE;
  }
  if (result == 0) result = map(pointer, size, memory);
  LEAVE("cuMemMap(%#llx, %zu, %#llx)", (unsigned long long)pointer, size,
        (unsigned long long)handle);
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
  ENTER("cuMemUnmap");
  if (result == 0) result = unmap(pointer, size);
  LEAVE("cuMemUnmap(%#llx, %zu)", (unsigned long long)pointer, size);
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *desc,
                        size_t count) {
  ENTER("cuMemSetAccess");
  if (result == 0 && (count != 1 || desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE)) {
    result = CUDA_ERROR_INVALID_VALUE;
  }
  if (result == 0 && !is_device(desc->location.id)) result = CUDA_ERROR_INVALID_DEVICE;
  if (result == 0) result = set_access(pointer, size, desc->flags);
  LEAVE("cuMemSetAccess(%#llx, %zu)", (unsigned long long)pointer, size);
}

/* Plain allocations are mappings whose handle nobody holds. */
CUresult cuMemAlloc(CUdeviceptr *pointer, size_t size) {
  ENTER("cuMemAlloc");
  uint64_t rounded = (size + FAKECUDA_GRANULARITY - 1) / FAKECUDA_GRANULARITY * FAKECUDA_GRANULARITY;
  CUmemGenericAllocationHandle handle = 0;
  if (result == 0 && size == 0) result = CUDA_ERROR_INVALID_VALUE;
  if (result == 0) result = create(&handle, rounded, current != NULL ? current->device : 0);
  if (result == 0) {
    physical *memory = physical_of(handle);
    result = reserve(pointer, rounded, 0, 0);
    if (result == 0) {
      result = map(*pointer, rounded, memory);
      if (result == 0) result = set_access(*pointer, rounded, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    }
    memory->held = 0;
    drop_if_unused(memory);
  }
  LEAVE("cuMemAlloc(%zu)", size);
}

CUresult cuMemFree(CUdeviceptr pointer) {
  ENTER("cuMemFree");
  if (result == 0) {
    result = CUDA_ERROR_INVALID_VALUE;
    for (reservation *r = reservations; r != NULL; r = r->next) {
      if (r->base != pointer) continue;
      /* Freeing waits for the device, unlike unmapping. */
      for (int device = 0; device < FAKECUDA_DEVICES; ++device) drain(device);
      uint64_t size = r->size;
      result = unmap(pointer, size);
      if (result == 0) result = release_address(pointer, size);
      break;
    }
  }
  LEAVE("cuMemFree(%#llx)", (unsigned long long)pointer);
}
