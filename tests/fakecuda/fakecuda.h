/* A stand-in for libcuda.so.1 and, on top of it, for the few calls of libcudart that vLLM makes.
 *
 * Device memory is host memory: a reservation is a range without access, physical memory is a
 * memfd, mapping puts the memfd there still without access, and cuMemSetAccess opens it. So copies
 * move real bytes, and a stray touch of memory that is not mapped faults as it would on a device.
 *
 * This header declares the control interface, for tests; they call it through ctypes. Where CUDA's
 * own headers are at hand, define FAKECUDA_WITH_CUDA_H and the definitions below are checked
 * against them by the compiler.
 */
#ifndef FAKECUDA_H
#define FAKECUDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef FAKECUDA_WITH_CUDA_H
#include <cuda.h>
#else
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;

typedef enum cudaError_enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_NOT_PERMITTED = 800,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_UNKNOWN = 999
} CUresult;

typedef enum CUdevice_attribute_enum {
  CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
  CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128
} CUdevice_attribute;
typedef enum CUmemAllocationType_enum { CU_MEM_ALLOCATION_TYPE_PINNED = 1 } CUmemAllocationType;
typedef enum CUmemLocationType_enum { CU_MEM_LOCATION_TYPE_DEVICE = 1 } CUmemLocationType;
typedef enum CUmemAllocationHandleType_enum {
  CU_MEM_HANDLE_TYPE_NONE = 0,
  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
  CU_MEM_HANDLE_TYPE_FABRIC = 8
} CUmemAllocationHandleType;
typedef enum CUmemAccess_flags_enum {
  CU_MEM_ACCESS_FLAGS_PROT_NONE = 0,
  CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
  CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3
} CUmemAccess_flags;
typedef enum CUmemAllocationGranularity_flags_enum {
  CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1
} CUmemAllocationGranularity_flags;

typedef struct CUmemLocation_st {
  CUmemLocationType type;
  int id;
} CUmemLocation;
typedef struct CUmemAllocationProp_st {
  CUmemAllocationType type;
  CUmemAllocationHandleType requestedHandleTypes;
  CUmemLocation location;
  void *win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
} CUmemAllocationProp;
typedef struct CUmemAccessDesc_st {
  CUmemLocation location;
  CUmemAccess_flags flags;
} CUmemAccessDesc;

#define cuMemAlloc cuMemAlloc_v2
#define cuMemFree cuMemFree_v2
#endif

/* Number of devices the stand-in shows, and the size memory comes in (bytes): of the real driver it
 * is 2 MiB, which takes eight times as long to fill, copy and compare. */
#define FAKECUDA_DEVICES 2
#define FAKECUDA_GRANULARITY ((size_t)256 << 10)

/* The `nth` next call (from 1) of `function` fails with `error` and does nothing else, as do the
 * `count - 1` calls after it. "*" stands for every function. Returns -1 for an unknown name. */
int fakecuda_fail(const char *function, uint64_t nth, int error, uint64_t count);
/* Forget every planned failure. */
void fakecuda_fail_nothing(void);

/* Calls of `function` since the start or since fakecuda_forget_calls. */
uint64_t fakecuda_calls(const char *function);
void fakecuda_forget_calls(void);
/* Name of the i-th function, NULL past the last. */
const char *fakecuda_function(size_t i);
/* The last calls, oldest first, one per line with arguments and result; returns the bytes needed. */
size_t fakecuda_trace(char *text, size_t size);

/* What is alive. A handle counts until it is released; physical memory until it is neither held by
 * a handle nor mapped, as on a device. */
uint64_t fakecuda_live_handles(void);
uint64_t fakecuda_live_mappings(void);
uint64_t fakecuda_live_reservations(void);
uint64_t fakecuda_physical_bytes(void);

/* Bytes of physical memory one device has; 0, the default, is without limit. */
void fakecuda_set_capacity(uint64_t bytes);
uint64_t fakecuda_capacity(void);
/* What cuDeviceGetAttribute answers, 0 by default. */
void fakecuda_set_attribute(int attribute, int value);
/* Whether memory may be made with a fabric handle (by default not: NOT_PERMITTED). */
void fakecuda_permit_fabric(int permitted);
/* Whether a reservation that asks for an address gets another (by default that one, if free). */
void fakecuda_ignore_hints(int ignored);

/* 0: some of the range is not mapped; 1: all mapped, not all accessible; 2: all accessible. */
int fakecuda_mapped(uint64_t address, size_t size);

/* Declare work in flight on a device that uses this range. Unmapping any of it is refused with
 * ILLEGAL_ADDRESS and counted as a violation. Synchronizing the device ends the work. */
void fakecuda_begin_work(int device, uint64_t address, size_t size);
uint64_t fakecuda_work_in_flight(void);
uint64_t fakecuda_violations(void);

/* The devices, as bits, on which the runtime has created contexts since it was last asked: a thread
 * that has set no device creates one on the first. */
unsigned fakecuda_contexts(void);

/* Bytes of host memory that are registered. */
uint64_t fakecuda_registered_bytes(void);
/* Whether a thread captures a CUDA graph: others may then not make unsafe calls, unless relaxed. */
void fakecuda_capture(int on);

/* From here on, memory of devices and host is one pool of so many bytes, and its peak is counted. What
 * is registered is in it, and what is taken here (which says whether there was room). */
void fakecuda_share(uint64_t limit);
uint64_t fakecuda_shared_peak(void);
int fakecuda_take_host(uint64_t size);
void fakecuda_give_host(uint64_t size);

/* Take everything back, and forget calls, failures and settings: the state after cuInit. */
void fakecuda_reset(void);

/* Used by the stand-in for libcudart. */
int fakecuda_copy(uint64_t to, uint64_t from, size_t size);
int fakecuda_fill(uint64_t to, int value, size_t size);
int fakecuda_enter(const char *function);
void fakecuda_use_context(int device);
int fakecuda_synchronize_device(int device);
int fakecuda_copy_async(uint64_t to, uint64_t from, size_t size, int device, const void *stream);
void fakecuda_synchronize_stream(const void *stream);
int fakecuda_register_host(uint64_t base, size_t size);
int fakecuda_unregister_host(uint64_t base);
int fakecuda_is_capturing(void);
int fakecuda_attribute(int attribute);

#endif
