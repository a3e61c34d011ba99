/* The model behind the stand-in driver: planned failures and the trace, address ranges, physical
 * memory. See model.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "model.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
physical *memories;
reservation *reservations;
mapping *mappings;
work *works;
host_range *host_ranges;
int capturing;
uint64_t shared_limit;
uint64_t shared_peak;
uint64_t host_taken;
/* Device address space: without access where nothing is mapped. */
#define SPACE ((uint64_t)1 << 40)
static uint64_t space;
static CUmemGenericAllocationHandle next_id = 0x7fa0000001ull;
uint64_t capacity;
uint64_t violations;
int attributes[256];
int fabric_permitted;
int hints_ignored;

/* Every function has its entry from the start, so that a wrong name in a test is an error. */
function functions[MAX_FUNCTIONS] = {
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
    {.name = "cudaMemcpyAsync"},
    {.name = "cudaMemcpy2DAsync"},
    {.name = "cudaMemcpyBatchAsync"},
    {.name = "cudaStreamCreateWithFlags"},
    {.name = "cudaStreamSynchronize"},
    {.name = "cudaDeviceGetAttribute"},
    {.name = "cudaDeviceGetPCIBusId"},
    {.name = "cudaThreadExchangeStreamCaptureMode"},
    {.name = "cudaGetLastError"},
    {.name = "cudaRuntimeGetVersion"},
};

#define TRACE_LINES 256
char trace[TRACE_LINES][128];
uint64_t traced;

function *find_function(const char *name) {
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

int enter(const char *name) {
  int any = planned_failure(&functions[0]);
  int own = planned_failure(find_function(name));
  return own != 0 ? own : any;
}

int done(int result, const char *format, ...) {
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
    if (base >= r->base && size <= r->size && base - r->base <= r->size - size) return r;
  }
  return NULL;
}

int is_device_range(uint64_t base, uint64_t size) {
  return space != 0 && overlap(base, size, space, SPACE);
}

int mapped_state(uint64_t base, uint64_t size) {
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

uint64_t physical_bytes(int device) {
  uint64_t sum = 0;
  for (physical *p = memories; p != NULL; p = p->next) {
    if (device < 0 || p->device == device) sum += p->size;
  }
  return sum;
}

physical *physical_of(CUmemGenericAllocationHandle id) {
  for (physical *p = memories; p != NULL; p = p->next) {
    if (p->id == id && p->held) return p;
  }
  return NULL;
}

void drop_if_unused(physical *memory) {
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

int shared_room(uint64_t size) {
  uint64_t used = host_taken + physical_bytes(-1) + size;
  for (host_range *r = host_ranges; r != NULL; r = r->next) used += r->size;
  if (shared_limit != 0 && used > shared_limit) return 0;
  if (used > shared_peak) shared_peak = used;
  return 1;
}

CUresult create(CUmemGenericAllocationHandle *handle, uint64_t size, int device) {
  if (capacity != 0 && (size > capacity || physical_bytes(device) > capacity - size)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (!shared_room(size)) return CUDA_ERROR_OUT_OF_MEMORY;
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

static void add_reservation(uint64_t base, uint64_t size) {
  reservation *made = calloc(1, sizeof *made);
  if (made == NULL) abort();
  reservation **at = &reservations;
  while (*at != NULL && (*at)->base < base) at = &(*at)->next;
  *made = (reservation){.next = *at, .base = base, .size = size};
  *at = made;
}

/* The lowest range that is free and fits. Real drivers do so with what was freed (driver 580; it
 * did not hand out a released handle again): a stale address may be that of another block, or
 * within another block, of any size. */
CUresult reserve(CUdeviceptr *pointer, uint64_t size, uint64_t alignment, uint64_t avoided) {
  if (alignment < FAKECUDA_GRANULARITY) alignment = FAKECUDA_GRANULARITY;
  if (space == 0) {
    /* Aligned to more than any test asks for. */
    void *at = mmap(NULL, 2 * SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    space = ((uint64_t)(uintptr_t)at + SPACE - 1) / SPACE * SPACE;
  }
  uint64_t base = space;
  for (reservation *r = reservations;; r = r->next) {
    if (avoided != 0 && overlap(base, size, avoided, size)) {
      base = (avoided + size + alignment - 1) / alignment * alignment;
    }
    if (r == NULL || base + size <= r->base) break;
    if (base < r->base + r->size) {
      base = (r->base + r->size + alignment - 1) / alignment * alignment;
    }
  }
  if (size > SPACE || base - space > SPACE - size) return CUDA_ERROR_OUT_OF_MEMORY;
  add_reservation(base, size);
  *pointer = base;
  return CUDA_SUCCESS;
}

int reserve_at(uint64_t base, uint64_t size) {
  if (space == 0 || base < space || size > SPACE || base - space > SPACE - size) return 0;
  for (reservation *r = reservations; r != NULL; r = r->next) {
    if (overlap(base, size, r->base, r->size)) return 0;
  }
  add_reservation(base, size);
  return 1;
}

CUresult release_address(uint64_t base, uint64_t size) {
  for (reservation **at = &reservations; *at != NULL; at = &(*at)->next) {
    reservation *r = *at;
    if (r->base != base || r->size != size) continue;
    for (mapping *m = mappings; m != NULL; m = m->next) {
      if (overlap(base, size, m->base, m->size)) return CUDA_ERROR_INVALID_VALUE;
    }
    *at = r->next;
    free(r);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult map(uint64_t base, uint64_t size, physical *memory) {
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

CUresult unmap(uint64_t base, uint64_t size) {
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

CUresult set_access(uint64_t base, uint64_t size, CUmemAccess_flags flags) {
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

void add_work(work begun) {
  work *made = malloc(sizeof *made);
  if (made == NULL) abort();
  *made = begun;
  made->next = NULL;
  work **last = &works;
  while (*last != NULL) last = &(*last)->next;
  *last = made;
}

static void end_work(int device, const void *stream) {
  for (work **at = &works; *at != NULL;) {
    work *w = *at;
    if (stream != NULL ? w->stream == stream : w->device == device) {
      *at = w->next;
      if (w->to != 0) {
        memmove((void *)(uintptr_t)w->to, (const void *)(uintptr_t)w->from, w->size);
      }
      free(w);
    } else {
      at = &w->next;
    }
  }
}

void drain(int device) { end_work(device, NULL); }

void drain_stream(const void *stream) { end_work(-1, stream); }

int is_registered(uint64_t base, uint64_t size) {
  for (host_range *r = host_ranges; r != NULL; r = r->next) {
    if (r->base <= base && base + size <= r->base + r->size) return 1;
  }
  return 0;
}
