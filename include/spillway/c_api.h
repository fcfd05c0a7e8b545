// The engine for C, and for languages that call C: the Python package (python/spillway) is written on it.
//
// Its calls are those of engine.h, model.h, snapshot.h, import.h and export.h, and what is said there holds: ownership,
// threads, what may follow an error. How statuses, messages, handles and structs are meant is in c_base.h.
//
// Handles are made by ..._create and its like and given back by ..._destroy or ..._release. An engine's streams, leases
// and activations go with it; to give one of them back later is answered like any handle that no longer lives. When two
// threads call with one engine or model at the same time, one gets SPILLWAY_BUSY, with nothing changed; calls that ask
// for a value, or give back a lease, activation or stream, wait for the other call instead. What a task is given,
// spillway_workers, is an address, and valid until the task returns.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "spillway/c_base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t spillway_dtype;
enum { SPILLWAY_FLOAT32, SPILLWAY_BFLOAT16, SPILLWAY_FLOAT16 };
typedef int32_t spillway_tier;
enum { SPILLWAY_HBM, SPILLWAY_HOST, SPILLWAY_NVME };
typedef int32_t spillway_pass;
enum { SPILLWAY_FORWARD, SPILLWAY_BACKWARD };
typedef int32_t spillway_access;
enum { SPILLWAY_READ, SPILLWAY_WRITE, SPILLWAY_UPDATE };
typedef int32_t spillway_device_kind;
enum { SPILLWAY_DEVICE_HOST, SPILLWAY_DEVICE_CUDA };
typedef int32_t spillway_on_existing;
enum { SPILLWAY_REFUSE, SPILLWAY_RESUME, SPILLWAY_REPLACE };

typedef struct spillway_config spillway_config;
typedef struct spillway_model spillway_model;
typedef struct spillway_engine spillway_engine;
typedef struct spillway_stream spillway_stream;
typedef struct spillway_lease spillway_lease;
typedef struct spillway_activation spillway_activation;
typedef struct spillway_workers spillway_workers;
typedef struct spillway_optimizer spillway_optimizer;
typedef struct spillway_scratch spillway_scratch;

// Parses the text of a ds_config.json; `name` stands in its errors.
spillway_status spillway_config_parse(const char* json, const char* name, spillway_config** config);
// What "auto" stands for where that depends on the run; 0: not known.
typedef struct {
  size_t struct_size;
  uint64_t hidden_size;  // the model's width
  uint64_t total_steps;  // of the run
} spillway_auto_values;
// The same with a second text put over the first, key by key: what `spillway sweep --json` writes. Null: none.
// `automatic` may be null.
spillway_status spillway_config_parse_with(const char* json, const char* name, const char* overlay,
                                           const char* overlay_name, const spillway_auto_values* automatic,
                                           spillway_config** config);
spillway_dtype spillway_config_weights(const spillway_config* config);
uint32_t spillway_config_micro_batch(const spillway_config* config);
uint32_t spillway_config_gradient_accumulation(const spillway_config* config);
// The values of all keys that have an effect and are not left to the plan, those of "auto" and defaults too, as one
// JSON object: {"optimizer.params.lr": 5e-05, …}. It lives as long as `config`.
const char* spillway_config_settings(const spillway_config* config);
// The learning rate of optimizer step `step`; 1 is the first.
double spillway_config_learning_rate(const spillway_config* config, uint64_t step);
// What an engine of this configuration has on this machine: the device (SPILLWAY_UNSUPPORTED where it cannot be had)
// and the compute threads.
spillway_status spillway_config_device(const spillway_config* config, spillway_device_kind* device);
uint32_t spillway_config_threads(const spillway_config* config);
spillway_status spillway_config_destroy(spillway_config* config);

// model.h: blocks, parameters and activations count from 0, in the order in which they are added.
spillway_model* spillway_model_create(void);
spillway_status spillway_model_add_block(spillway_model* model, const char* name);
// `shape`: `rank` extents, row-major. `pushes`: gradients that come for it in a step; SPILLWAY_ANY_PUSHES: as many as
// come, until a push without data says that no more do. Not trainable: no gradient.
#define SPILLWAY_ANY_PUSHES UINT32_MAX
spillway_status spillway_model_add_parameter(spillway_model* model, uint32_t block, const char* name,
                                             const uint64_t* shape, size_t rank, int trainable, uint32_t pushes);
// Frozen bytes in the place of a parameter, a quantized weight say, of `elements` of the weight type: Parameter::bytes.
spillway_status spillway_model_add_bytes(spillway_model* model, uint32_t block, const char* name, uint64_t elements);
// The visits of a step in order. None: forward over all blocks, backward in reverse.
spillway_status spillway_model_add_visit(spillway_model* model, uint32_t block, spillway_pass pass);
spillway_status spillway_model_set_workspace(spillway_model* model, uint64_t bytes);
// Bytes that the program keeps between visits by itself, parts of the budgets: ModelDescription::kept_host_bytes, ….
spillway_status spillway_model_set_kept(spillway_model* model, uint64_t host, uint64_t nvme, uint64_t moving);
// What a visit of the block computes for one micro-batch and backward needs again: spillway_engine_insides().
spillway_status spillway_model_set_insides(spillway_model* model, uint32_t block, uint64_t bytes);
spillway_status spillway_model_set_micro_batches(spillway_model* model, uint32_t micro_batches);
// What is kept from one visit to another, and the uses of a step in order: with them what does not fit HBM moves.
// `held`: the most that are acquired at one time; 1 if not set.
spillway_status spillway_model_add_activation(spillway_model* model, uint64_t bytes);
spillway_status spillway_model_add_activation_use(spillway_model* model, uint32_t activation, spillway_access access,
                                                  uint32_t visit);
spillway_status spillway_model_set_activations_held(spillway_model* model, uint32_t held);
// Adds a weight type that the program's arithmetic handles. Without one: any. A configuration with another type is
// SPILLWAY_UNSUPPORTED.
spillway_status spillway_model_accept_dtype(spillway_model* model, spillway_dtype dtype);
// A small file that is written beside exported weights, config.json say.
spillway_status spillway_model_attach(spillway_model* model, const char* name, const char* text);
spillway_status spillway_model_destroy(spillway_model* model);

typedef struct {
  size_t struct_size;
  spillway_on_existing on_existing;
  int32_t poison_released;  // not 0, for tests: a released lease is filled with NaN
  const char* snapshot;     // null: none
  const char* trace;        // null: none
  uint64_t trace_spans;     // 0: the default
} spillway_options;

// Gives weights, piece by piece: writes the values [first, first + count) of a parameter, as fp32. It returns 0, or
// anything else to end the import with SPILLWAY_INVALID_ARGUMENT.
typedef int (*spillway_weight_source)(void* user, uint32_t block, uint32_t parameter, uint64_t first, float* out,
                                      uint64_t count);

typedef struct {
  size_t struct_size;
  const char* tag;                // null: the one that `latest` names
  const spillway_dtype* weights;  // of the run that goes on; null: as DeepSpeed trained
  int unverified;                 // not 0: what is read is not first compared with the CRC-32s in the files
  spillway_weight_source frozen;  // null, or gives frozen parameters where the checkpoint has none of them
  void* frozen_user;
  uint64_t max_file_bytes;                                      // of the snapshot's files; 0: the default
  void (*progress)(void* user, uint64_t done, uint64_t bytes);  // null, or told how much has been read
  void* progress_user;
} spillway_import_options;

// import.h: what DeepSpeed's save_checkpoint() wrote becomes a snapshot, for spillway_options. `options` may be null.
// `facts`, null or called once, on the caller's thread, when the snapshot is whole: what `spillway import --json` says;
// the text lives until it returns. It is not called when the import fails. What it throws makes the call fail, and the
// snapshot stays.
spillway_status spillway_import_deepspeed(const char* directory, const spillway_model* model, const char* snapshot,
                                          const spillway_import_options* options,
                                          void (*facts)(void* user, const char* json), void* user);

// `options` may be null. Config and model are copied.
spillway_status spillway_engine_create(const spillway_config* config, const spillway_model* model,
                                       const spillway_options* options, spillway_engine** engine);
// Makes the last finished step durable. Failures of that are in the log; spillway_engine_flush() returns them. While a
// call with the engine is under way: SPILLWAY_BUSY, or from inside of it SPILLWAY_INVALID_ARGUMENT; the engine stays.
spillway_status spillway_engine_destroy(spillway_engine* engine);

uint64_t spillway_engine_current_step(const spillway_engine* engine);
double spillway_engine_loss_scale(const spillway_engine* engine);
double spillway_engine_next_learning_rate(const spillway_engine* engine);
spillway_device_kind spillway_engine_device(const spillway_engine* engine);
// Copies at most `capacity` bytes of the blob of the current step; returns how many it has.
size_t spillway_engine_blob(const spillway_engine* engine, void* out, size_t capacity);
// The facts of the plan, a line a call, and the ledger, a reservation a call.
spillway_status spillway_engine_describe(const spillway_engine* engine, void (*line)(void* user, const char* text),
                                         void* user);
spillway_status spillway_engine_ledger(const spillway_engine* engine,
                                       void (*entry)(void* user, spillway_tier tier, const char* purpose,
                                                     uint64_t bytes),
                                       void* user);
uint64_t spillway_engine_budget(const spillway_engine* engine, spillway_tier tier);
// The seconds that the schedule gives a step; 0 while that is not known.
double spillway_engine_predicted_step_seconds(const spillway_engine* engine);

// Asks for every weight.
spillway_status spillway_engine_import_weights(spillway_engine* engine, spillway_weight_source source, void* user);
// Shows every weight in the same way: the exact master, or the one that forward and backward use.
typedef int (*spillway_weight_sink)(void* user, uint32_t block, uint32_t parameter, uint64_t first, const float* values,
                                    uint64_t count);
spillway_status spillway_engine_export_weights(spillway_engine* engine, int exact, spillway_weight_sink sink,
                                               void* user);

void* spillway_engine_workspace(spillway_engine* engine, uint64_t* bytes);
// Memory for the tensors that a block's visits compute inside the block. `kept`, not null, becomes 1 where backward
// finds what forward left.
void* spillway_engine_insides(spillway_engine* engine, uint32_t block, uint64_t* bytes, int32_t* kept);
// 1: all of it lies in the engine's HBM.
int spillway_engine_in_hbm(const spillway_engine* engine, const void* data, size_t bytes);

// A cudaStream_t of the caller's; null is CUDA's default stream. Where a stream is asked for, a null spillway_stream is
// the engine's own. A stream that is destroyed inside a step takes no more calls; the step ends as if it were still
// there.
spillway_status spillway_engine_adopt_stream(spillway_engine* engine, void* native, spillway_stream** stream);
spillway_status spillway_stream_synchronize(spillway_engine* engine, spillway_stream* stream);
// The cudaStream_t; null on the host device.
void* spillway_stream_native(spillway_engine* engine, spillway_stream* stream);
// Host device (SPILLWAY_UNSUPPORTED on cuda): `work` runs after what was enqueued before, on the stream's thread. It
// must not call the engine. `user` must live until it has run.
spillway_status spillway_stream_launch(spillway_engine* engine, spillway_stream* stream,
                                       void (*work)(void* user, spillway_workers* workers), void* user);
// Inside of `work`, for as long as it runs: body(user, 0) ... body(user, count - 1) on the compute threads, in any
// order.
spillway_status spillway_workers_parallel_for(spillway_workers* workers, size_t count,
                                              void (*body)(void* user, size_t index), void* user);
uint32_t spillway_workers_threads(const spillway_workers* workers);
spillway_status spillway_stream_destroy(spillway_stream* stream);

spillway_status spillway_engine_acquire(spillway_engine* engine, uint32_t block, spillway_pass pass,
                                        spillway_stream* stream, spillway_lease** lease);
const void* spillway_lease_weight(const spillway_lease* lease, uint32_t parameter);
spillway_status spillway_lease_release(spillway_lease* lease);  // and destroys it

spillway_status spillway_engine_acquire_activation(spillway_engine* engine, uint32_t activation, spillway_access access,
                                                   spillway_stream* stream, spillway_activation** acquired);
void* spillway_activation_data(const spillway_activation* activation);
spillway_status spillway_activation_release(spillway_activation* activation);  // and destroys it

// `data`: device address of `elements` values, as many as the parameter has (0: not said), in fp32 or the weights'
// type; all of them in memory that the engine lends: the workspace, inner activations, or what is acquired. Null: the
// visit brings no gradient for the parameter. A parameter that gets none in a step is left out of the update: no decay,
// and the step does not count for its bias correction.
spillway_status spillway_engine_push_gradient(spillway_engine* engine, uint32_t block, uint32_t parameter,
                                              const void* data, uint64_t elements, spillway_dtype dtype,
                                              spillway_stream* stream);

// Before the first gradient of the step that comes: its learning rate, and that of the steps after it.
spillway_status spillway_engine_set_learning_rate(spillway_engine* engine, double rate);
spillway_status spillway_engine_set_betas(spillway_engine* engine, double beta1, double beta2);

enum {  // stall.h, in its order
  SPILLWAY_STALL_READ,
  SPILLWAY_STALL_WRITE,
  SPILLWAY_STALL_COPY,
  SPILLWAY_STALL_GRADIENT,
  SPILLWAY_STALL_UPDATE,
  SPILLWAY_STALL_COMMIT,
  SPILLWAY_STALL_SAVE,
  SPILLWAY_STALL_OTHER,
  SPILLWAY_STALL_NETWORK,
  SPILLWAY_STALLS = 16,  // room for those to come
};

// StepReport in engine.h.
typedef struct {
  size_t struct_size;
  uint64_t step, durable_step;
  double gradient_norm, learning_rate, seconds, stall_seconds, link_percent;
  double loss_scale;   // what this step's loss was to be multiplied with; 1 without fp16
  int32_t skipped;     // fp16: a gradient overflowed, and nothing was updated
  int32_t taken_back;  // what was updated on a guess had to be updated once more
  uint64_t nvme_read_bytes, nvme_write_bytes, h2d_bytes, d2h_bytes, unplanned_visits;
  char link[16];  // the slowest: nvme, h2d, d2h, network, compute
  double adam_seconds;
  uint64_t visits, visit_hits, tile_bytes, tile_hit_bytes, speculative_blocks;
  double stalls[SPILLWAY_STALLS];  // seconds by cause; together stall_seconds
} spillway_step_report;

// `blob`: null with 0 bytes for none. `report` may be null.
spillway_status spillway_engine_step(spillway_engine* engine, const void* blob, size_t bytes,
                                     spillway_step_report* report);
// Forgets visits and gradients since the last step.
spillway_status spillway_engine_discard_step(spillway_engine* engine);
spillway_status spillway_engine_flush(spillway_engine* engine);

// A snapshot (snapshot.h). `options` may be null.
typedef struct {
  size_t struct_size;
  int32_t replace;           // not 0: one that is there is replaced
  uint64_t max_file_bytes;   // 0: the default
  int32_t leave_out_frozen;  // not 0: only what is trained, for spillway_engine_load_snapshot()
} spillway_save_options;
spillway_status spillway_engine_save(spillway_engine* engine, const char* directory,
                                     const spillway_save_options* options);
// The same in two parts, with steps between them.
spillway_status spillway_engine_begin_save(spillway_engine* engine, const char* directory,
                                           const spillway_save_options* options);
spillway_status spillway_engine_finish_save(spillway_engine* engine);
// Engine::load_snapshot(): one that is refused changes nothing.
spillway_status spillway_engine_load_snapshot(spillway_engine* engine, const char* directory);

// Engine::read_values() and write_values(): what one parameter has, as fp32. Several ranks call them together; those of
// rank `from` are written, and `values` may be null on the others.
typedef int32_t spillway_parameter_values;
enum { SPILLWAY_VALUES_MASTER, SPILLWAY_VALUES_EXP_AVG, SPILLWAY_VALUES_EXP_AVG_SQ, SPILLWAY_VALUES_GRADIENT };
spillway_status spillway_engine_read_values(spillway_engine* engine, spillway_parameter_values of, uint32_t block,
                                            uint32_t parameter, spillway_weight_sink sink, void* user);
spillway_status spillway_engine_write_values(spillway_engine* engine, spillway_parameter_values of, uint32_t block,
                                             uint32_t parameter, const float* values, uint64_t count, uint32_t from);

typedef struct {
  size_t struct_size;
  uint64_t step;
  uint64_t model;  // equal for runs of the same parameters, weight type and optimizer
  spillway_dtype weights;
} spillway_snapshot_info;
// SPILLWAY_NOT_FOUND, with the reason, where there is no whole snapshot. `facts` may be null.
spillway_status spillway_find_snapshot(const char* directory, spillway_snapshot_info* facts);
spillway_status spillway_remove_snapshot(const char* directory);

// The weights alone (export.h): of an engine, of a store that no engine has open, of a snapshot. `options` may be null.
// `step`, not null, becomes the step that they are of.
typedef struct {
  size_t struct_size;
  spillway_dtype dtype;
  int32_t replace;          // not 0: a model that is there is replaced
  uint64_t max_file_bytes;  // 0: the default
} spillway_export_options;
spillway_status spillway_engine_export(spillway_engine* engine, const char* directory,
                                       const spillway_export_options* options);
spillway_status spillway_export_store(const char* const* paths, size_t count, const char* directory,
                                      const spillway_export_options* options, uint64_t* step);
spillway_status spillway_export_snapshot(const char* snapshot, const char* directory,
                                         const spillway_export_options* options, uint64_t* step);

// offload_optimizer.h: the caller keeps weights and gradients, and the library the states. Tensors count from 0, block
// after block as the model was described; every call that takes them takes all of them.
// In host memory, contiguous, of the configuration's type of weights, or SPILLWAY_ELSEWHERE. No gradient: the tensor is
// left out.
typedef struct {
  void* weight;
  const void* gradient;
} spillway_tensor;
#define SPILLWAY_ELSEWHERE ((void*)~(uintptr_t)0)
// TensorCarrier of offload_optimizer.h: elements [first, first + count) of a tensor. Null: not asked for.
typedef struct {
  uint32_t slot, tensor;
  uint64_t first, count;
  void *weight, *gradient;
} spillway_carried_piece;
// Each function returns 0, or anything else to end the call, and the optimizer where states may have changed.
typedef struct {
  size_t struct_size;
  void* user;
  int (*bring)(void* user, const spillway_carried_piece* piece);
  int (*give)(void* user, const spillway_carried_piece* piece);
  int (*wait)(void* user, uint32_t slot);
  int (*leaf_sums)(void* user, uint32_t tensor, double* sums, uint64_t count);
} spillway_tensor_carrier;
typedef struct {
  size_t struct_size;
  spillway_on_existing on_existing;
  int32_t keep_gradients;                  // not 0: spillway_optimizer_gradient_memory()
  const char* snapshot;                    // null: none
  const spillway_tensor_carrier* carrier;  // null: no tensor is elsewhere. It is copied
  int64_t mostly_elsewhere;                // not 0: most are
} spillway_optimizer_options;
// Of a group of tensors; each optimizer reads its own. All of it is to be written.
typedef struct {
  size_t struct_size;
  double learning_rate, beta1, beta2, epsilon, weight_decay, momentum, dampening;
  int32_t decoupled_decay, nesterov;
} spillway_hyperparameters;
typedef int32_t spillway_optimizer_state;
enum { SPILLWAY_MASTER, SPILLWAY_EXP_AVG, SPILLWAY_EXP_AVG_SQ };

// `options` may be null. Config and model are copied.
spillway_status spillway_optimizer_create(const spillway_config* config, const spillway_model* model,
                                          const spillway_optimizer_options* options, spillway_optimizer** optimizer);
spillway_status spillway_optimizer_destroy(spillway_optimizer* optimizer);
uint64_t spillway_optimizer_current_step(const spillway_optimizer* optimizer);
size_t spillway_optimizer_blob(const spillway_optimizer* optimizer, void* out, size_t capacity);
spillway_status spillway_optimizer_set_blob(spillway_optimizer* optimizer, const void* blob, size_t bytes);
spillway_status spillway_optimizer_describe(const spillway_optimizer* optimizer,
                                            void (*line)(void* user, const char* text), void* user);
spillway_status spillway_optimizer_ledger(const spillway_optimizer* optimizer,
                                          void (*entry)(void* user, spillway_tier tier, const char* purpose,
                                                        uint64_t bytes),
                                          void* user);
// By tensor; `count` is the number of tensors.
spillway_status spillway_optimizer_update_counts(const spillway_optimizer* optimizer, uint64_t* counts, size_t count);
spillway_status spillway_optimizer_import_weights(spillway_optimizer* optimizer, const spillway_tensor* tensors,
                                                  size_t count);
spillway_status spillway_optimizer_load_weights(spillway_optimizer* optimizer, const spillway_tensor* tensors,
                                                size_t count);
// Of all gradients. Infinite where one is not finite: `first_nonfinite`, which may be null, becomes the number of its
// tensor, else UINT32_MAX.
spillway_status spillway_optimizer_gradient_norm(spillway_optimizer* optimizer, const spillway_tensor* tensors,
                                                 size_t count, double* norm, uint32_t* first_nonfinite);

typedef struct {
  size_t struct_size;
  const spillway_tensor* tensors;
  size_t count;
  const spillway_hyperparameters* const* groups;
  size_t group_count;
  const uint32_t* group_of;  // by tensor: index into groups
  double gradient_scale;     // 0: 1
  const void* blob;
  size_t blob_bytes;
  int64_t finite;  // not 0: spillway_optimizer_gradient_norm() has said that these gradients are
} spillway_optimizer_step;
typedef struct {
  size_t struct_size;
  uint64_t step, durable_step;
  double seconds, adam_seconds, stall_seconds;
  uint64_t nvme_read_bytes, nvme_write_bytes, tile_bytes, tile_hit_bytes;
} spillway_optimizer_report;
// `report` may be null.
spillway_status spillway_optimizer_make_step(spillway_optimizer* optimizer, const spillway_optimizer_step* step,
                                             spillway_optimizer_report* report);
// Memory for the tensor's gradient; null without keep_gradients.
void* spillway_optimizer_gradient_memory(spillway_optimizer* optimizer, uint32_t tensor, uint64_t* bytes);
// What a carrier copies from and to, to be pinned for a GPU; null without one.
void* spillway_optimizer_staging(spillway_optimizer* optimizer, uint64_t* bytes);

// Values [first, first + count) of a tensor, as fp32. It returns 0, or anything else to end the call with
// SPILLWAY_INVALID_ARGUMENT.
typedef int (*spillway_state_sink)(void* user, uint32_t tensor, uint64_t first, const float* values, uint64_t count);
typedef int (*spillway_state_source)(void* user, spillway_optimizer_state state, uint32_t tensor, uint64_t first,
                                     float* out, uint64_t count);
spillway_status spillway_optimizer_export_state(spillway_optimizer* optimizer, spillway_optimizer_state state,
                                                const spillway_tensor* tensors, size_t count, spillway_state_sink sink,
                                                void* user);
// `masters`: not 0 where `source` has SPILLWAY_MASTER, too; else weights are what the tensors hold.
spillway_status spillway_optimizer_import_state(spillway_optimizer* optimizer, uint64_t step,
                                                const uint64_t* update_counts, int32_t masters,
                                                const spillway_tensor* tensors, size_t count,
                                                spillway_state_source source, void* user);
spillway_status spillway_optimizer_save(spillway_optimizer* optimizer, const char* directory,
                                        const spillway_save_options* options, const spillway_tensor* tensors,
                                        size_t count);

// A caller's bytes that wait on the drives, as what a loop keeps between blocks does: a file without a name in each of
// the configuration's nvme_paths, gone with the process. Direct I/O; address, offset and bytes are multiples of 4096.
// Memory that a write or read is given must stay as it is until spillway_scratch_wait() has returned for its ticket.
spillway_status spillway_scratch_create(const spillway_config* config, spillway_scratch** scratch);
spillway_status spillway_scratch_destroy(spillway_scratch* scratch);  // waits for what is under way
uint32_t spillway_scratch_files(const spillway_scratch* scratch);
spillway_status spillway_scratch_write(spillway_scratch* scratch, uint32_t file, uint64_t offset, const void* data,
                                       uint64_t bytes, uint64_t* ticket);
spillway_status spillway_scratch_read(spillway_scratch* scratch, uint32_t file, uint64_t offset, void* data,
                                      uint64_t bytes, uint64_t* ticket);
spillway_status spillway_scratch_wait(spillway_scratch* scratch, uint64_t ticket);
spillway_status spillway_scratch_moved(const spillway_scratch* scratch, uint64_t* read_bytes, uint64_t* written_bytes);

#ifdef __cplusplus
}
#endif
