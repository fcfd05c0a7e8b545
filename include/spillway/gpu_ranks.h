// GPUs of ranks, joined by NCCL: a communicator over MPI, or over a program's own messages (c_ranks.h), then takes
// streams of the `cuda` device, too.
//
// make_communicator("nccl") takes a GPU and joins it. A program that learns later whether there are GPUs asks for these
// one by one, as the program `spillway` does. All calls are collective, and come from the thread that calls the
// communicator. A rank's GPU is CUDA's current one in that thread: the first that CUDA shows, unless the program has
// chosen another (cudaSetDevice). NCCL needs one for each rank.
#pragma once

#include "spillway/communicator.h"
#include "spillway/config.h"

namespace spillway {

// Where several ranks of a machine see the same GPUs, has each see one of them alone, in their order: it sets
// CUDA_VISIBLE_DEVICES, unless the launcher has divided them. Before CUDA is used in the process, and while no other
// thread asks for the environment. Throws what ends a communicator.
void take_gpu(Communicator& ranks);

// From here on data that lies on a stream of the `cuda` device is moved by NCCL, from GPU to GPU; words between ranks,
// and the values of an all_reduce, go as before. Takes the GPU first, as above. It takes GPU memory, so it comes before
// the engine. Of ranks that are joined it only sees that each still has that GPU. Nothing is done for one rank that is
// not over MPI. Throws kUnsupported, kDevice and kIo, on all ranks where one of them has no GPU or no NCCL, and
// kInvalidArgument where two have the same GPU.
void join_gpus(Communicator& ranks);

// Makes `config.device` the same on every rank, and joins the GPUs where that is `cuda`: those that are current, none
// is taken. Where a rank asks for cuda it throws as join_gpus() does, and where another asks for the host. Where all
// leave it open (`auto`) and not each can have a GPU, all use the CPU, and rank 0 logs a warning that says whose GPU is
// missing, or what else is. Nothing is done for one rank.
void agree_on_device(Config& config, Communicator& ranks);

}  // namespace spillway
