// Several ranks for C, and for languages that call C: a communicator (communicator.h) over whatever the program has
// that carries messages between its processes, and an engine on it. The Python package gives it torch.distributed.
//
// What the program brings is a table of two functions, to send and to receive. It has no collectives and no sums,
// though many libraries do: they differ in what sizes they take, in which order they add and in what they block on,
// while all of them send; and Spillway's collectives are cut into pieces, and added up in a tree, of messages between
// two ranks anyhow. So what a table can get wrong is little, and a sum has the same bits over every one of them. Nor is
// there a function that asks whether a message is over: whoever carries it says so, and no thread looks in vain.
// Messages are of host memory. GPUs are joined over them, and then move their data by themselves, over NCCL.
//
// Ownership: the table is copied, what `user` points to must live until close() has returned. Memory of a message is
// the communicator's, and stays until its message is over, or close() has returned.
// Threads: functions of the table are called by the communicator's own thread, never by two at a time, and return at
// once. spillway_message_over() may be called by any thread, inside of them too. Calls of a communicator come from one
// thread at a time, which is that of its engines; spillway_communicator_note_work() by any.
// Errors: a function of the table returns 0, or anything else where it cannot; a message that fails later is over with
// the reason. Either ends the communicator on all ranks, with an error that names ranks; so does a rank that leaves, or
// `patience_seconds` without progress. Every call after that says so, on this rank as well.
#pragma once

#include "spillway/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct spillway_communicator spillway_communicator;
typedef struct spillway_message spillway_message;

// Between two ranks messages of one channel arrive in the order in which they were sent, and each meets the receive
// that was started in the same place of that order, of the same size. What waits in one channel does not hold up the
// other.
typedef int32_t spillway_channel;
enum { SPILLWAY_CHANNEL_WORDS, SPILLWAY_CHANNEL_DATA };

typedef int32_t spillway_parting;
enum {
  SPILLWAY_PARTING_TOGETHER,  // all ranks have said their last word, and no message is on its way
  SPILLWAY_PARTING_EARLY,     // this one goes, and others go on: receives from them have nothing to come
  SPILLWAY_PARTING_LOST,      // a rank does not answer, or has failed
};

typedef struct {
  size_t struct_size;
  void* user;
  uint32_t rank, ranks;  // this process, and how many there are
  const char* library;   // what carries messages: name and version, for the user. Copied
  // Starts a message of `bytes`, more than none. The receiver may not have asked for it yet.
  int (*send)(void* user, uint32_t to, spillway_channel channel, const void* data, uint64_t bytes,
              spillway_message* message);
  int (*receive)(void* user, uint32_t from, spillway_channel channel, void* data, uint64_t bytes,
                 spillway_message* message);
  // The last call. Gives up what is not over yet; after it nothing of the program's touches memory of messages. After a
  // failure calls of the communicator return only then, so it waits for none of them. Null: there is nothing to do.
  void (*close)(void* user, spillway_parting parting);
} spillway_transport;

// Once for each message: what was to be sent may be overwritten, or what was to come has come. `failure`: null, or why
// not.
spillway_status spillway_message_over(spillway_message* message, const char* failure);

// CommunicatorOptions in communicator.h; 0: the default. The same on every rank.
typedef struct {
  size_t struct_size;
  double patience_seconds;
  uint64_t scratch_bytes;
} spillway_communicator_options;

// Returns when all ranks have come, and fails when one does not. `options` may be null.
spillway_status spillway_communicator_create(const spillway_transport* transport,
                                             const spillway_communicator_options* options,
                                             spillway_communicator** communicator);
uint32_t spillway_communicator_rank(const spillway_communicator* communicator);
uint32_t spillway_communicator_ranks(const spillway_communicator* communicator);
// `bytes` of rank `root` are at `data` on every rank when it returns. All ranks call it in the same place, with as many
// bytes.
spillway_status spillway_communicator_broadcast(spillway_communicator* communicator, void* data, uint64_t bytes,
                                                uint32_t root);
// For long work before a call in which other ranks wait: now and then, while the work goes on. They wait until
// `patience_seconds` after the last.
spillway_status spillway_communicator_note_work(spillway_communicator* communicator);
// Until it is called with 0: calls of this rank, of its engines too, are of its end, which an error of its own may have
// brought. Others that call something else are told that this one ends, and not that ranks differ.
spillway_status spillway_communicator_note_ending(spillway_communicator* communicator, int ending);
// Waits for the other ranks to hear of it, for as long as its patience. An engine that was made with it keeps it until
// that has gone, too.
spillway_status spillway_communicator_destroy(spillway_communicator* communicator);

// spillway_engine_create() on every rank of `communicator`, null for this process alone: with the same configuration,
// model and options, and then with the same calls in the same order (docs/ranks.md), an export too, which the first one
// writes. Rank r has its store in rank<r> below each nvme_path. The engines of ranks on one machine divide its cores.
// spillway.device becomes the same on all of them, as agree_on_device() of gpu_ranks.h says. On GPUs each rank's is
// CUDA's current one in this thread (cudaSetDevice), another one for each. The first such engine of a communicator
// joins them, which takes libspillway_nccl.so, and later ones are on the same GPUs. It has run on emulated GPUs alone
// so far.
spillway_status spillway_engine_create_on(spillway_communicator* communicator, const spillway_config* config,
                                          const spillway_model* model, const spillway_options* options,
                                          spillway_engine** engine);
// spillway_engine_push_gradient() with the number of the step's micro-batch, from 0 over all ranks: what an engine
// needs to know whose configuration has spillway.sum_groups, and which spillway_engine_create() refuses therefore. Of n
// micro-batches rank r of R has [r n / R, (r + 1) n / R).
spillway_status spillway_engine_push_gradient_of(spillway_engine* engine, uint32_t micro_batch, uint32_t block,
                                                 uint32_t parameter, const void* data, uint64_t elements,
                                                 spillway_dtype dtype, spillway_stream* stream);
// spillway_config_parse_with() for a run of so many ranks: train_batch_size is the rows of all of them.
spillway_status spillway_config_parse_for(uint32_t ranks, const char* json, const char* name, const char* overlay,
                                          const char* overlay_name, const spillway_auto_values* automatic,
                                          spillway_config** config);

// roll_back_store() of store.h: from the step that a store's next run goes on from to the one before. For ranks that
// have a store of their own each, of an optimizer say (spillway_optimizer_create()), and are one step ahead of others.
// Nothing may have it open. `step`, not null, becomes the step that it is at then.
spillway_status spillway_roll_back_store(const char* const* paths, size_t count, uint64_t* step);
// The commits that such a store has, the newest first, one or two: of each its step, and the caller's own of it. It may
// be open in this process. For ranks that look for the newest one that all have.
spillway_status spillway_store_commits(const char* const* paths, size_t count,
                                       void (*commit)(void* user, uint64_t step, const void* blob, size_t blob_bytes),
                                       void* user);

#ifdef __cplusplus
}
#endif
