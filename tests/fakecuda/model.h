/* What the stand-in driver holds, shared by its files: driver.c is the driver's interface to it,
 * control.c the tests'. One lock guards everything; nothing here is fast, all of it is strict. */
#ifndef FAKECUDA_MODEL_H
#define FAKECUDA_MODEL_H

#include "fakecuda.h"

#include <pthread.h>

/* Names as common as `lock`, `map` and `create` stay inside the library: exported, they could be
 * bound to those of the program that loads it. */
#pragma GCC visibility push(hidden)

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
} reservation;

typedef struct mapping {
  struct mapping *next;
  uint64_t base;
  uint64_t size;
  physical *memory;
  CUmemAccess_flags access;
} mapping;

/* What a device does: until it has ended, its range must not be unmapped. */
typedef struct work {
  struct work *next;
  int device;
  uint64_t base;
  uint64_t size;
  uint64_t to; /* of a copy, which is made when the work ends; 0 for other work */
  uint64_t from;
  const void *stream; /* NULL where only the device can be waited for */
} work;

/* Host memory that is registered. */
typedef struct host_range {
  struct host_range *next;
  uint64_t base;
  uint64_t size;
} host_range;

#define MAX_FUNCTIONS 64
typedef struct function {
  const char *name;
  uint64_t calls;
  uint64_t fail_from; /* the call number the planned failure begins with, 0 for none */
  uint64_t fail_count;
  int error;
} function;

extern pthread_mutex_t lock;
extern physical *memories;
extern reservation *reservations; /* the lowest first */
extern mapping *mappings;
extern work *works; /* the oldest first */
extern host_range *host_ranges;
extern int capturing;
/* One pool of memory for devices and host, as on an integrated GPU; without limit where 0. */
extern uint64_t shared_limit;
extern uint64_t shared_peak;
extern uint64_t host_taken; /* by other host memory than what is registered */
extern uint64_t capacity;
extern uint64_t violations;
extern int attributes[256];
extern int fabric_permitted;
extern int hints_ignored;

/* Ends with an entry without a name; [0] is "*". */
extern function functions[MAX_FUNCTIONS];

#define TRACE_LINES 256
extern char trace[TRACE_LINES][128];
extern uint64_t traced;

/* Whoever calls one of these holds the lock. */

function *find_function(const char *name);
/* Count the call; the planned error, if there is one. */
int enter(const char *name);
/* Note the call and its result in the trace; the result. */
__attribute__((format(printf, 2, 3))) int done(int result, const char *format, ...);

/* Whether any byte of the range is in device address space, reserved or not. */
int is_device_range(uint64_t base, uint64_t size);
/* As fakecuda_mapped. */
int mapped_state(uint64_t base, uint64_t size);

/* Of one device, or of all where `device` is negative. */
uint64_t physical_bytes(int device);
/* NULL where the handle is unknown or was released. */
physical *physical_of(CUmemGenericAllocationHandle id);
void drop_if_unused(physical *memory);
/* Whether the shared pool has room; notes its peak. */
int shared_room(uint64_t size);
CUresult create(CUmemGenericAllocationHandle *handle, uint64_t size, int device);

CUresult reserve(CUdeviceptr *pointer, uint64_t size, uint64_t alignment, uint64_t avoided);
/* Reserve exactly this range, if all of it is free device address space. */
int reserve_at(uint64_t base, uint64_t size);
CUresult release_address(uint64_t base, uint64_t size);
CUresult map(uint64_t base, uint64_t size, physical *memory);
CUresult unmap(uint64_t base, uint64_t size);
CUresult set_access(uint64_t base, uint64_t size, CUmemAccess_flags flags);
/* End all work in flight on the device, or of one stream: copies are made, in their order. */
void drain(int device);
void drain_stream(const void *stream);
void add_work(work begun);
/* Whether the whole range is registered. */
int is_registered(uint64_t base, uint64_t size);

#pragma GCC visibility pop

#endif
