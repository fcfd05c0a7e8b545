// Files, queues, stripes and memory for direct I/O in C: the calls of io_file.h, shared_io_queue.h, stripe_map.h,
// rate_probe.h and io_memory.h, and what is said there holds. How statuses, messages, handles and structs are meant is
// in c_base.h. libspillway_io has these alone; libspillway has them beside the engine. docs/io.md has the way in.
//
// Thread: any, several at a time with one handle, unless said otherwise. A caller's mistake is a status with a message,
// never the program's end. A forked process may use the files that it inherits; calls with a queue of its parent's are
// SPILLWAY_UNSUPPORTED there, and it makes its own.
#pragma once

#include "spillway/c_base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct spillway_io_file spillway_io_file;
typedef struct spillway_io_queue spillway_io_queue;
typedef struct spillway_stripe_map spillway_stripe_map;

// ---- Files

typedef struct {
  size_t struct_size;
  int32_t writable;
  int32_t create;        // a file that is there already: SPILLWAY_EXISTS. Its mode is 0600
  int32_t follow_links;  // a symbolic link as the last part of the path, which is refused otherwise
  int32_t buffered;      // through the page cache; 0: O_DIRECT is asked for
} spillway_io_file_options;
// `options` may be null: to read, direct.
spillway_status spillway_io_file_open(const char* path, const spillway_io_file_options* options,
                                      spillway_io_file** file);
// Gives up its lock, too. SPILLWAY_BUSY, and nothing is closed, while a queue has it or another thread calls with it.
spillway_status spillway_io_file_close(spillway_io_file* file);

typedef struct {
  size_t struct_size;
  uint64_t size_bytes;
  uint32_t alignment;         // of the offset and the length of a transfer
  uint32_t memory_alignment;  // of its address
  int32_t direct;             // whether the file system granted O_DIRECT
  int32_t sync_error;         // errno of the sync that failed, here or in a queue; 0: none did
  int32_t at_its_path;        // whether its path still names this file
  int32_t unused;
} spillway_io_file_info;
spillway_status spillway_io_file_describe(const spillway_io_file* file, spillway_io_file_info* facts);

// Takes the disk space of the first `bytes`, writing zeros where the file system cannot reserve; ..._reserve leaves the
// file as it is there and says 0. SPILLWAY_IO where there is no room.
spillway_status spillway_io_file_preallocate(spillway_io_file* file, uint64_t bytes);
spillway_status spillway_io_file_reserve(spillway_io_file* file, uint64_t bytes, int32_t* reserved);
// ..._lock is exclusive, against other processes and other handles: SPILLWAY_BUSY where it cannot be had within the
// time. ..._lock_shared is for readers; it says 0 where another has the exclusive one.
spillway_status spillway_io_file_lock(spillway_io_file* file, double patience_seconds);
spillway_status spillway_io_file_lock_shared(spillway_io_file* file, int32_t* locked);
// Renames it, durably. SPILLWAY_BUSY while a queue has the file.
spillway_status spillway_io_file_rename(spillway_io_file* file, const char* path);

// Blocking and whole. A read may find the file's end after `least_bytes`; 0: after all of `bytes`.
spillway_status spillway_io_file_read(const spillway_io_file* file, uint64_t offset, void* data, uint64_t bytes,
                                      uint64_t least_bytes);
spillway_status spillway_io_file_write(spillway_io_file* file, uint64_t offset, const void* data, uint64_t bytes);
// fdatasync. A failure is final for the file.
spillway_status spillway_io_file_sync(spillway_io_file* file);

// The smallest aligned range that holds what is asked for: read `bytes` at `offset`, with least_bytes; what was asked
// for begins `skip` bytes later.
typedef struct {
  size_t struct_size;
  uint64_t offset, bytes, skip, least_bytes;
} spillway_io_range;
spillway_status spillway_io_file_aligned_range(const spillway_io_file* file, uint64_t offset, uint64_t bytes,
                                               spillway_io_range* range);

// ---- Memory that direct I/O can use

typedef struct {
  size_t struct_size;
  uint64_t alignment;  // what it was asked for or the page's, whichever is more
  int32_t locked;      // whether it stays in RAM
  int32_t lock_error;  // if not: errno of mlock(2)
} spillway_io_memory_info;
// Zeros, in pages of their own, which a forked process does not have. `alignment`: a power of two up to 1 GiB, 0: 4096.
// It is locked where the system allows it, and is good memory where not; `granted`, which may be null, says which.
spillway_status spillway_io_memory_allocate(uint64_t bytes, uint64_t alignment, void** memory,
                                            spillway_io_memory_info* granted);
// SPILLWAY_BUSY while a queue has some of it as a region. Null: nothing.
spillway_status spillway_io_memory_free(void* memory);

// ---- Stripes: one address space over several files

// shares[i]: units of a row on file i, 1 to 255.
spillway_status spillway_stripe_map_create(const uint32_t* shares, size_t files, uint64_t unit_bytes,
                                           uint64_t header_bytes, spillway_stripe_map** map);
spillway_status spillway_stripe_map_destroy(spillway_stripe_map* map);
// The file of a byte of the space, at or after header_bytes; UINT32_MAX is none.
uint32_t spillway_stripe_map_file_of(const spillway_stripe_map* map, uint64_t space_offset);
typedef struct {
  size_t struct_size;
  uint64_t space_offset, file_offset, bytes;
} spillway_stripe_run;
// The first run on `file` at or after an offset of the space.
spillway_status spillway_stripe_map_next_on(const spillway_stripe_map* map, uint32_t file, uint64_t space_offset,
                                            spillway_stripe_run* run);
// The size that a file has when the space ends there.
uint64_t spillway_stripe_map_file_bytes(const spillway_stripe_map* map, uint32_t file, uint64_t space_bytes);
// Shares of drives with these rates and so much room, of a row of 1 to 255 units; a share of 0: leave the drive out.
// SPILLWAY_DOES_NOT_FIT where the space has no room.
spillway_status spillway_stripe_shares(const double* rates, const uint64_t* room_bytes, size_t files,
                                       uint64_t space_bytes, uint32_t row_units, uint32_t* shares);

// ---- Queues

typedef int32_t spillway_io_engine;
enum { SPILLWAY_IO_AUTO, SPILLWAY_IO_URING, SPILLWAY_IO_LIBAIO, SPILLWAY_IO_THREADS };
typedef int32_t spillway_io_op;
enum { SPILLWAY_IO_READ, SPILLWAY_IO_WRITE, SPILLWAY_IO_SYNC };
typedef int32_t spillway_io_priority;
enum { SPILLWAY_IO_URGENT, SPILLWAY_IO_NORMAL };

// 0 is the value in brackets.
typedef struct {
  size_t struct_size;
  spillway_io_engine engine;    // auto: io_uring, else libaio, else threads; every one that is not had is logged
  uint32_t depth;               // pieces in flight per file (32); depth * max_files is 4096 at most
  uint64_t block_bytes;         // the largest piece (1 MiB)
  uint32_t max_requests;        // submitted and not taken (4096)
  uint32_t max_files;           // at a time (16, or as many as are given)
  uint32_t max_regions;         // at a time (16)
  uint32_t file_count;          // of `files`, which have the indices from 0
  double stall_report_seconds;  // (30)
  spillway_io_file* const* files;
  const spillway_stripe_map* stripes;  // over `files`, which then stay as long as the queue. Null: no striped space
} spillway_io_queue_options;
// `options` may be null.
spillway_status spillway_io_queue_create(const spillway_io_queue_options* options, spillway_io_queue** queue);
// Ends every request: what is in flight is waited for, what has not started completes with ECANCELED. Completions can
// be taken as before; nothing is submitted any more.
spillway_status spillway_io_queue_close(spillway_io_queue* queue);
// Does the same, and logs how many requests failed without anybody having taken their completion. Threads that wait
// get what there is. Files and memory are the caller's again once this has returned and they have.
spillway_status spillway_io_queue_destroy(spillway_io_queue* queue);

// Adds a file to a queue that exists; `index` names it until it is removed. Removing it while requests are under way on
// it is SPILLWAY_BUSY.
spillway_status spillway_io_queue_add_file(spillway_io_queue* queue, spillway_io_file* file, uint32_t* index);
spillway_status spillway_io_queue_remove_file(spillway_io_queue* queue, uint32_t index);
// Adds memory that transfers use, which the kernel then need not pin for each of them; `registered`, which may be null,
// says whether the kernel has it. Transfers of other memory work, too. It stays mapped until it was removed, by its
// first byte, and nothing of it is under way.
spillway_status spillway_io_queue_add_region(spillway_io_queue* queue, void* data, uint64_t bytes, int32_t* registered);
spillway_status spillway_io_queue_remove_region(spillway_io_queue* queue, void* data);

#define SPILLWAY_IO_STRIPED UINT32_MAX  // as a file: the striped space

// Of one size for good. What is not used is 0.
typedef struct {
  spillway_io_op op;
  spillway_io_priority priority;
  uint32_t file;  // its index in the queue, or SPILLWAY_IO_STRIPED
  uint32_t unused;
  uint64_t offset;       // offset and bytes: multiples of the file's alignment
  void* buffer;          // of its memory_alignment; the caller's until the completion. Null to sync
  uint64_t bytes;        // 0 to sync
  uint64_t tag;          // comes back with the completion
  uint64_t least_bytes;  // of a read: the file may end after these; 0: after all of it
} spillway_io_request;
// In their order. `taken`, which may be null, says how many were: all, or those before the first that is refused.
// SPILLWAY_BUSY: the queue is full; take completions and submit the rest.
spillway_status spillway_io_queue_submit(spillway_io_queue* queue, const spillway_io_request* requests, size_t count,
                                         size_t* taken);

// Of one size for good.
typedef struct {
  uint64_t tag;
  int32_t error;        // an errno value; 0: all of it was done. ENODATA: the file ended inside a read
  uint32_t error_file;  // and where it failed
  uint64_t error_offset, error_bytes;
} spillway_io_completion;
// Waits for the first completion and takes those that there are, up to `capacity`. timeout_seconds: negative waits as
// long as something is under way; -INFINITY also when nothing is, until ..._wake(), which ends one wait early.
spillway_status spillway_io_queue_wait(spillway_io_queue* queue, spillway_io_completion* completions, size_t capacity,
                                       double timeout_seconds, size_t* count);
spillway_status spillway_io_queue_wake(spillway_io_queue* queue);
// Makes SPILLWAY_IO of a completion with an error, with what failed and where as the message; `op` is its request's.
spillway_status spillway_io_queue_check(const spillway_io_queue* queue, spillway_io_op op,
                                        const spillway_io_completion* completion);

typedef struct {
  size_t struct_size;
  uint64_t read_bytes, write_bytes, syncs;
  double busy_seconds;  // with at least one transfer in flight
  uint64_t pending;     // requests submitted and not taken
} spillway_io_stats;
spillway_status spillway_io_queue_stats(const spillway_io_queue* queue, spillway_io_stats* stats);
// `io_uring, registered buffers` and the like: what was granted.
spillway_status spillway_io_queue_describe(const spillway_io_queue* queue, void (*line)(void* user, const char* text),
                                           void* user);

// Bytes per second that a drive reads and writes at once, measured in a directory of it within a second or so: 160 MiB
// are written, and nothing is left behind. Takes engine, block_bytes and depth of `options`, which may be null.
spillway_status spillway_io_probe_rate(const char* directory, const spillway_io_queue_options* options,
                                       double* bytes_per_second);

#ifdef __cplusplus
}
#endif
