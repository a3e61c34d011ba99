/* See fakecuda.h. One lock guards everything; nothing here is fast, all of it is strict. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "fakecuda.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct CUctx_st {
  int device;
};

typedef struct physical {
  struct physical *next;
  CUmemGenericAllocationHandle id;
  uint64_t size;
  int device;
  int file;
  int held;      /* the handle was not released */
  int mappings;
} physical;

typedef struct reservation {
  struct reservation *next;
  uint64_t base;
  uint64_t size;
  int live; /* freed ranges stay without access, so that a late touch of one is noticed */
} reservation;

typedef struct mapping {
  struct mapping *next;
  uint64_t base;
  uint64_t size;
  physical *memory;
  CUmemAccess_flags access;
} mapping;

typedef struct work {
  struct work *next;
  int device;
  uint64_t base;
  uint64_t size;
} work;

#define MAX_FUNCTIONS 64
typedef struct function {
  const char *name;
  uint64_t calls;
  uint64_t fail_from; /* the call number the planned failure begins with, 0 for none */
  uint64_t fail_count;
  int error;
} function;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static physical *memories;
static reservation *reservations;
static mapping *mappings;
static work *works;
static struct CUctx_st primary[FAKECUDA_DEVICES];
static _Thread_local CUcontext current;
static CUmemGenericAllocationHandle next_id = 0x7fa0000001ull;
static uint64_t capacity;
static uint64_t violations;
static int attributes[256];
static int fabric_permitted;
static int hints_ignored;
static int initialized;

/* Every function has its entry from the start, so that a wrong name in a test is an error. */
static function functions[MAX_FUNCTIONS] = {
    {.name = "*"},
    {.name = "cuInit"},
    {.name = "cuDeviceGet"},
    {.name = "cuDeviceGetCount"},
    {.name = "cuDeviceGetAttribute"},
    {.name = "cuDevicePrimaryCtxRetain"},
    {.name = "cuCtxGetCurrent"},
    {.name = "cuCtxSetCurrent"},
    {.name = "cuCtxSynchronize"},
    {.name = "cuGetErrorString"},
    {.name = "cuMemGetAllocationGranularity"},
    {.name = "cuMemAddressReserve"},
    {.name = "cuMemAddressFree"},
    {.name = "cuMemCreate"},
    {.name = "cuMemRelease"},
    {.name = "cuMemMap"},
    {.name = "cuMemUnmap"},
    {.name = "cuMemSetAccess"},
    {.name = "cuMemAlloc"},
    {.name = "cuMemFree"},
    {.name = "cudaSetDevice"},
    {.name = "cudaDeviceSynchronize"},
    {.name = "cudaDeviceReset"},
    {.name = "cudaMalloc"},
    {.name = "cudaFree"},
    {.name = "cudaMemset"},
    {.name = "cudaMemcpy"},
    {.name = "cudaIpcGetMemHandle"},
    {.name = "cudaIpcOpenMemHandle"},
    {.name = "cudaHostRegister"},
    {.name = "cudaHostUnregister"},
    {.name = "cudaGetLastError"},
};

#define TRACE_LINES 256
static char trace[TRACE_LINES][128];
static uint64_t traced;

static function *find_function(const char *name) {
  for (function *f = functions; f->name != NULL; ++f) {
    if (strcmp(f->name, name) == 0) return f;
  }
  return NULL;
}

static int planned_failure(function *f) {
  f->calls += 1;
  if (f->fail_from != 0 && f->calls >= f->fail_from && f->calls < f->fail_from + f->fail_count) {
    return f->error;
  }
  return 0;
}

/* Count the call; the planned error, if there is one. The lock is held. */
static int enter(const char *name) {
  int any = planned_failure(&functions[0]);
  int own = planned_failure(find_function(name));
  return own != 0 ? own : any;
}

__attribute__((format(printf, 2, 3))) static int done(int result, const char *format, ...) {
  char *line = trace[traced++ % TRACE_LINES];
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(line, sizeof trace[0], format, arguments);
  va_end(arguments);
  if (length >= 0 && (size_t)length < sizeof trace[0]) {
    snprintf(line + length, sizeof trace[0] - (size_t)length, " = %d", result);
  }
  return result;
}

/* ---- ranges ------------------------------------------------------------------------------- */

static int overlap(uint64_t a, uint64_t a_size, uint64_t b, uint64_t b_size) {
  return a < b + b_size && b < a + a_size;
}

static reservation *reservation_holding(uint64_t base, uint64_t size) {
  for (reservation *r = reservations; r != NULL; r = r->next) {
    if (r->live && base >= r->base && size <= r->size && base - r->base <= r->size - size) return r;
  }
  return NULL;
}

/* Whether any byte of the range is, or once was, device address space. */
static int is_device_range(uint64_t base, uint64_t size) {
  for (reservation *r = reservations; r != NULL; r = r->next) {
    if (overlap(base, size, r->base, r->size)) return 1;
  }
  return 0;
}

static int mapped_state(uint64_t base, uint64_t size) {
  uint64_t covered = 0;
  uint64_t open = 0;
  for (mapping *m = mappings; m != NULL; m = m->next) {
    if (!overlap(base, size, m->base, m->size)) continue;
    uint64_t from = base > m->base ? base : m->base;
    uint64_t to = base + size < m->base + m->size ? base + size : m->base + m->size;
    covered += to - from;
    if (m->access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) open += to - from;
  }
  if (covered != size) return 0;
  return open == size ? 2 : 1;
}

/* Whether the range is made of whole mappings, with nothing in between and nothing left over. */
static int whole_mappings(uint64_t base, uint64_t size) {
  uint64_t covered = 0;
  for (mapping *m = mappings; m != NULL; m = m->next) {
    if (!overlap(base, size, m->base, m->size)) continue;
    if (m->base < base || m->base + m->size > base + size) return 0;
    covered += m->size;
  }
  return size != 0 && covered == size;
}

static void no_access(uint64_t base, uint64_t size) {
  void *at = mmap((void *)(uintptr_t)base, size, PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (at == MAP_FAILED) abort();
}

/* ---- physical memory ---------------------------------------------------------------------- */

static uint64_t physical_bytes(int device) {
  uint64_t sum = 0;
  for (physical *p = memories; p != NULL; p = p->next) {
    if (device < 0 || p->device == device) sum += p->size;
  }
  return sum;
}

static physical *physical_of(CUmemGenericAllocationHandle id) {
  for (physical *p = memories; p != NULL; p = p->next) {
    if (p->id == id && p->held) return p;
  }
  return NULL;
}

static void drop_if_unused(physical *memory) {
  if (memory->held || memory->mappings != 0) return;
  for (physical **at = &memories; *at != NULL; at = &(*at)->next) {
    if (*at == memory) {
      *at = memory->next;
      close(memory->file);
      free(memory);
      return;
    }
  }
}

static CUresult create(CUmemGenericAllocationHandle *handle, uint64_t size, int device) {
  if (capacity != 0 && (size > capacity || physical_bytes(device) > capacity - size)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  int file = memfd_create("fakecuda", MFD_CLOEXEC);
  if (file < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  physical *memory = calloc(1, sizeof *memory);
  if (memory == NULL || ftruncate(file, (off_t)size) != 0) {
    free(memory);
    close(file);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *memory = (physical){.next = memories, .id = next_id, .size = size, .device = device,
                       .file = file, .held = 1};
  memories = memory;
  next_id += 0x40; /* never used again: a stale handle is always an unknown one */
  *handle = memory->id;
  return CUDA_SUCCESS;
}

static CUresult reserve(CUdeviceptr *pointer, uint64_t size, uint64_t alignment) {
  if (alignment < FAKECUDA_GRANULARITY) alignment = FAKECUDA_GRANULARITY;
  void *at = mmap(NULL, size + alignment, PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  uint64_t start = (uint64_t)(uintptr_t)at;
  uint64_t base = (start + alignment - 1) / alignment * alignment;
  if (base != start) munmap(at, base - start);
  if (base + size != start + size + alignment) {
    munmap((void *)(uintptr_t)(base + size), start + alignment - base);
  }
  reservation *made = calloc(1, sizeof *made);
  if (made == NULL) abort();
  *made = (reservation){.next = reservations, .base = base, .size = size, .live = 1};
  reservations = made;
  *pointer = base;
  return CUDA_SUCCESS;
}

/* A range that was freed is there still, without access: it can be reserved again where it was. */
static int reserve_again(uint64_t base, uint64_t size) {
  for (reservation *r = reservations; r != NULL; r = r->next) {
    if (!r->live && r->base == base && r->size == size) return r->live = 1;
  }
  return 0;
}

static CUresult release_address(uint64_t base, uint64_t size) {
  for (reservation *r = reservations; r != NULL; r = r->next) {
    if (!r->live || r->base != base || r->size != size) continue;
    for (mapping *m = mappings; m != NULL; m = m->next) {
      if (overlap(base, size, m->base, m->size)) return CUDA_ERROR_INVALID_VALUE;
    }
    r->live = 0;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

static CUresult map(uint64_t base, uint64_t size, physical *memory) {
  if (memory->size != size || reservation_holding(base, size) == NULL) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (mapping *m = mappings; m != NULL; m = m->next) {
    if (overlap(base, size, m->base, m->size)) return CUDA_ERROR_INVALID_VALUE;
  }
  mapping *made = calloc(1, sizeof *made);
  if (made == NULL) abort();
  void *at = mmap((void *)(uintptr_t)base, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->file,
                  0);
  if (at == MAP_FAILED) abort();
  *made = (mapping){.next = mappings, .base = base, .size = size, .memory = memory};
  mappings = made;
  memory->mappings += 1;
  return CUDA_SUCCESS;
}

static CUresult unmap(uint64_t base, uint64_t size) {
  if (!whole_mappings(base, size)) return CUDA_ERROR_INVALID_VALUE;
  for (work *w = works; w != NULL; w = w->next) {
    if (overlap(base, size, w->base, w->size)) {
      violations += 1;
      return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
  }
  for (mapping **at = &mappings; *at != NULL;) {
    mapping *m = *at;
    if (!overlap(base, size, m->base, m->size)) {
      at = &m->next;
      continue;
    }
    *at = m->next;
    m->memory->mappings -= 1;
    drop_if_unused(m->memory);
    free(m);
  }
  no_access(base, size);
  return CUDA_SUCCESS;
}

static CUresult set_access(uint64_t base, uint64_t size, CUmemAccess_flags flags) {
  if (!whole_mappings(base, size)) return CUDA_ERROR_INVALID_VALUE;
  int protection = flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
                   : flags == CU_MEM_ACCESS_FLAGS_PROT_READ    ? PROT_READ
                                                               : PROT_NONE;
  if (mprotect((void *)(uintptr_t)base, size, protection) != 0) abort();
  for (mapping *m = mappings; m != NULL; m = m->next) {
    if (overlap(base, size, m->base, m->size)) m->access = flags;
  }
  return CUDA_SUCCESS;
}

static void drain(int device) {
  for (work **at = &works; *at != NULL;) {
    work *w = *at;
    if (w->device == device) {
      *at = w->next;
      free(w);
    } else {
      at = &w->next;
    }
  }
}

/* ---- the driver's own interface ------------------------------------------------------------ */

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
  /* `at` is a hint, followed where that address was freed before; a test may have it ignored. */
  if (result == 0 && at != 0 && !hints_ignored && reserve_again(at, size)) {
    *pointer = at;
  } else if (result == 0) {
    result = reserve(pointer, size, alignment);
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
    result = reserve(pointer, rounded, 0);
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
      if (!r->live || r->base != pointer) continue;
      /* Freeing waits for the device, unlike unmapping. */
      for (int device = 0; device < FAKECUDA_DEVICES; ++device) drain(device);
      result = unmap(pointer, r->size);
      if (result == 0) result = release_address(pointer, r->size);
      break;
    }
  }
  LEAVE("cuMemFree(%#llx)", (unsigned long long)pointer);
}

/* ---- control ------------------------------------------------------------------------------- */

int fakecuda_fail(const char *name, uint64_t nth, int error, uint64_t count) {
  pthread_mutex_lock(&lock);
  function *f = find_function(name);
  if (f != NULL) {
    f->fail_from = f->calls + nth;
    f->fail_count = count;
    f->error = error;
  }
  pthread_mutex_unlock(&lock);
  return f != NULL ? 0 : -1;
}

void fakecuda_fail_nothing(void) {
  pthread_mutex_lock(&lock);
  for (function *f = functions; f->name != NULL; ++f) f->fail_from = 0;
  pthread_mutex_unlock(&lock);
}

uint64_t fakecuda_calls(const char *name) {
  pthread_mutex_lock(&lock);
  function *f = find_function(name);
  uint64_t calls = f != NULL ? f->calls : UINT64_MAX;
  pthread_mutex_unlock(&lock);
  return calls;
}

void fakecuda_forget_calls(void) {
  pthread_mutex_lock(&lock);
  for (function *f = functions; f->name != NULL; ++f) {
    f->calls = 0;
    f->fail_from = 0;
  }
  traced = 0;
  pthread_mutex_unlock(&lock);
}

const char *fakecuda_function(size_t i) {
  /* [0] is "*". */
  return i + 1 < MAX_FUNCTIONS ? functions[i + 1].name : NULL;
}

size_t fakecuda_trace(char *text, size_t size) {
  pthread_mutex_lock(&lock);
  size_t needed = 1;
  uint64_t first = traced > TRACE_LINES ? traced - TRACE_LINES : 0;
  if (size != 0) text[0] = '\0';
  for (uint64_t i = first; i < traced; ++i) {
    const char *line = trace[i % TRACE_LINES];
    size_t length = strlen(line);
    if (needed + length + 1 <= size) {
      memcpy(text + needed - 1, line, length);
      memcpy(text + needed - 1 + length, "\n", 2);
    }
    needed += length + 1;
  }
  pthread_mutex_unlock(&lock);
  return needed;
}

uint64_t fakecuda_live_handles(void) {
  pthread_mutex_lock(&lock);
  uint64_t count = 0;
  for (physical *p = memories; p != NULL; p = p->next) count += (uint64_t)p->held;
  pthread_mutex_unlock(&lock);
  return count;
}

uint64_t fakecuda_live_mappings(void) {
  pthread_mutex_lock(&lock);
  uint64_t count = 0;
  for (mapping *m = mappings; m != NULL; m = m->next) count += 1;
  pthread_mutex_unlock(&lock);
  return count;
}

uint64_t fakecuda_live_reservations(void) {
  pthread_mutex_lock(&lock);
  uint64_t count = 0;
  for (reservation *r = reservations; r != NULL; r = r->next) count += (uint64_t)r->live;
  pthread_mutex_unlock(&lock);
  return count;
}

uint64_t fakecuda_physical_bytes(void) {
  pthread_mutex_lock(&lock);
  uint64_t sum = physical_bytes(-1);
  pthread_mutex_unlock(&lock);
  return sum;
}

void fakecuda_set_capacity(uint64_t bytes) {
  pthread_mutex_lock(&lock);
  capacity = bytes;
  pthread_mutex_unlock(&lock);
}

uint64_t fakecuda_capacity(void) {
  pthread_mutex_lock(&lock);
  uint64_t bytes = capacity;
  pthread_mutex_unlock(&lock);
  return bytes;
}

void fakecuda_set_attribute(int attribute, int value) {
  pthread_mutex_lock(&lock);
  if (attribute >= 0 && attribute < 256) attributes[attribute] = value;
  pthread_mutex_unlock(&lock);
}

void fakecuda_permit_fabric(int permitted) {
  pthread_mutex_lock(&lock);
  fabric_permitted = permitted;
  pthread_mutex_unlock(&lock);
}

void fakecuda_ignore_hints(int ignored) {
  pthread_mutex_lock(&lock);
  hints_ignored = ignored;
  pthread_mutex_unlock(&lock);
}

void fakecuda_reset(void) {
  pthread_mutex_lock(&lock);
  for (int device = 0; device < FAKECUDA_DEVICES; ++device) drain(device);
  while (mappings != NULL) unmap(mappings->base, mappings->size);
  while (memories != NULL) {
    memories->held = 0;
    drop_if_unused(memories);
  }
  for (reservation *r = reservations; r != NULL; r = r->next) r->live = 0;
  for (function *f = functions; f->name != NULL; ++f) f->calls = f->fail_from = 0;
  memset(attributes, 0, sizeof attributes);
  capacity = violations = traced = 0;
  fabric_permitted = hints_ignored = 0;
  pthread_mutex_unlock(&lock);
}

int fakecuda_mapped(uint64_t address, size_t size) {
  pthread_mutex_lock(&lock);
  int state = mapped_state(address, size);
  pthread_mutex_unlock(&lock);
  return state;
}

void fakecuda_begin_work(int device, uint64_t address, size_t size) {
  work *begun = calloc(1, sizeof *begun);
  if (begun == NULL) abort();
  pthread_mutex_lock(&lock);
  *begun = (work){.next = works, .device = device, .base = address, .size = size};
  works = begun;
  pthread_mutex_unlock(&lock);
}

uint64_t fakecuda_work_in_flight(void) {
  pthread_mutex_lock(&lock);
  uint64_t count = 0;
  for (work *w = works; w != NULL; w = w->next) count += 1;
  pthread_mutex_unlock(&lock);
  return count;
}

uint64_t fakecuda_violations(void) {
  pthread_mutex_lock(&lock);
  uint64_t count = violations;
  pthread_mutex_unlock(&lock);
  return count;
}

/* Copy while the lock is held, so that nothing is unmapped in the middle. A device range has to be
 * mapped and accessible as a whole; other addresses are taken as the host's. */
int fakecuda_copy(uint64_t to, uint64_t from, size_t size) {
  pthread_mutex_lock(&lock);
  int result = 0;
  if (size != 0) {
    if (is_device_range(from, size) && mapped_state(from, size) != 2) {
      result = CUDA_ERROR_INVALID_VALUE;
    } else if (is_device_range(to, size) && mapped_state(to, size) != 2) {
      result = CUDA_ERROR_INVALID_VALUE;
    } else {
      memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, size);
    }
  }
  pthread_mutex_unlock(&lock);
  return result;
}

int fakecuda_fill(uint64_t to, int value, size_t size) {
  pthread_mutex_lock(&lock);
  int result = size == 0 || mapped_state(to, size) == 2 ? 0 : CUDA_ERROR_INVALID_VALUE;
  if (result == 0 && size != 0) memset((void *)(uintptr_t)to, value, size);
  pthread_mutex_unlock(&lock);
  return result;
}

int fakecuda_enter(const char *name) {
  pthread_mutex_lock(&lock);
  int result = done(enter(name), "%s()", name);
  pthread_mutex_unlock(&lock);
  return result;
}

int fakecuda_synchronize_device(int device) {
  pthread_mutex_lock(&lock);
  drain(device);
  pthread_mutex_unlock(&lock);
  return 0;
}
