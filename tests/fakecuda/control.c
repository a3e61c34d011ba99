/* The control interface, for tests and for the stand-in for libcudart: see fakecuda.h. */
#include "model.h"

#include <stdlib.h>
#include <string.h>

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
  for (reservation *r = reservations; r != NULL; r = r->next) count += 1;
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
  while (reservations != NULL) release_address(reservations->base, reservations->size);
  for (function *f = functions; f->name != NULL; ++f) f->calls = f->fail_from = 0;
  memset(attributes, 0, sizeof attributes);
  while (host_ranges != NULL) {
    host_range *range = host_ranges;
    host_ranges = range->next;
    free(range);
  }
  capacity = violations = traced = 0;
  shared_limit = shared_peak = host_taken = 0;
  fabric_permitted = hints_ignored = capturing = 0;
  pthread_mutex_unlock(&lock);
}

int fakecuda_mapped(uint64_t address, size_t size) {
  pthread_mutex_lock(&lock);
  int state = mapped_state(address, size);
  pthread_mutex_unlock(&lock);
  return state;
}

void fakecuda_begin_work(int device, uint64_t address, size_t size) {
  pthread_mutex_lock(&lock);
  add_work((work){.device = device, .base = address, .size = size});
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

/* A copy that the stream makes later. From or to host memory that is not registered it is made at
 * once, as the real one stages it. */
int fakecuda_copy_async(uint64_t to, uint64_t from, size_t size, int device, const void *stream) {
  pthread_mutex_lock(&lock);
  int result = 0;
  int to_device = size != 0 && is_device_range(to, size);
  int from_device = size != 0 && is_device_range(from, size);
  if (from_device && mapped_state(from, size) != 2) {
    result = CUDA_ERROR_INVALID_VALUE;
  } else if (to_device && mapped_state(to, size) != 2) {
    result = CUDA_ERROR_INVALID_VALUE;
  } else if (size != 0) {
    uint64_t host = to_device ? from : to;
    if (to_device == from_device || !is_registered(host, size)) {
      drain_stream(stream);
      memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, size);
    } else {
      add_work((work){.device = device,
                      .base = to_device ? to : from,
                      .size = size,
                      .to = to,
                      .from = from,
                      .stream = stream});
    }
  }
  pthread_mutex_unlock(&lock);
  return result;
}

void fakecuda_synchronize_stream(const void *stream) {
  pthread_mutex_lock(&lock);
  drain_stream(stream);
  pthread_mutex_unlock(&lock);
}

/* cudaErrorHostMemoryAlreadyRegistered, cudaErrorHostMemoryNotRegistered */
int fakecuda_register_host(uint64_t base, size_t size) {
  pthread_mutex_lock(&lock);
  int result = size == 0 ? CUDA_ERROR_INVALID_VALUE : 0;
  for (host_range *r = host_ranges; r != NULL; r = r->next) {
    if (base < r->base + r->size && r->base < base + size) result = 712;
  }
  if (result == 0 && !shared_room(size)) result = CUDA_ERROR_OUT_OF_MEMORY;
  if (result == 0) {
    host_range *made = malloc(sizeof *made);
    if (made == NULL) abort();
    *made = (host_range){.next = host_ranges, .base = base, .size = size};
    host_ranges = made;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

int fakecuda_unregister_host(uint64_t base) {
  pthread_mutex_lock(&lock);
  int result = 713;
  for (host_range **at = &host_ranges; *at != NULL; at = &(*at)->next) {
    host_range *range = *at;
    if (range->base != base) continue;
    for (work *w = works; w != NULL; w = w->next) {
      uint64_t host = w->to == w->base ? w->from : w->to;
      if (w->to != 0 && base <= host && host < base + range->size) violations += 1;
    }
    *at = range->next;
    free(range);
    result = 0;
    break;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

void fakecuda_share(uint64_t limit) {
  pthread_mutex_lock(&lock);
  shared_limit = limit;
  shared_peak = 0;
  pthread_mutex_unlock(&lock);
}

uint64_t fakecuda_shared_peak(void) {
  pthread_mutex_lock(&lock);
  uint64_t peak = shared_peak;
  pthread_mutex_unlock(&lock);
  return peak;
}

int fakecuda_take_host(uint64_t size) {
  pthread_mutex_lock(&lock);
  int room = shared_room(size);
  if (room) host_taken += size;
  pthread_mutex_unlock(&lock);
  return room;
}

void fakecuda_give_host(uint64_t size) {
  pthread_mutex_lock(&lock);
  host_taken -= size;
  pthread_mutex_unlock(&lock);
}

uint64_t fakecuda_registered_bytes(void) {
  pthread_mutex_lock(&lock);
  uint64_t sum = 0;
  for (host_range *r = host_ranges; r != NULL; r = r->next) sum += r->size;
  pthread_mutex_unlock(&lock);
  return sum;
}

static unsigned contexts;

void fakecuda_use_context(int device) {
  pthread_mutex_lock(&lock);
  contexts |= 1u << device;
  pthread_mutex_unlock(&lock);
}

unsigned fakecuda_contexts(void) {
  pthread_mutex_lock(&lock);
  unsigned created = contexts;
  contexts = 0;
  pthread_mutex_unlock(&lock);
  return created;
}

void fakecuda_capture(int on) {
  pthread_mutex_lock(&lock);
  capturing = on;
  pthread_mutex_unlock(&lock);
}

int fakecuda_is_capturing(void) {
  pthread_mutex_lock(&lock);
  int on = capturing;
  pthread_mutex_unlock(&lock);
  return on;
}

int fakecuda_attribute(int attribute) {
  pthread_mutex_lock(&lock);
  int value = attribute >= 0 && attribute < 256 ? attributes[attribute] : 0;
  pthread_mutex_unlock(&lock);
  return value;
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
