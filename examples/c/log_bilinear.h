/* The arithmetic of tied.c: a log-bilinear model of bytes (Mnih and Hinton, 2007). The vector h is a sum over the
 * kContext bytes before a byte: their rows of the embedding E, each times its own row of C, element by element. The
 * logits of the byte are E h.
 */
#pragma once

#include <math.h>
#include <string.h>

#include "spillway/c_api.h"

enum { kBytes = 256, kWidth = 64, kContext = 8, kRows = 128 };

/* All that a step computes with lies in the engine's workspace, but the weights. */
typedef struct {
  float x[kRows][kContext * kWidth], h[kRows][kWidth], dh[kRows][kWidth];
  float dhead[kBytes][kWidth], dmix[kContext * kWidth], dembedding[kBytes][kWidth];
  const unsigned char* rows[kRows]; /* kContext bytes, and the one after them */
  double loss;
} Step;

/* What a visit of a step works with, until the step has ended. */
typedef struct {
  Step* step;
  const float* weight; /* of the block that is visited, which the engine lends */
} Visit;

/* Work for the stream runs later, in order; spillway_workers_parallel_for() would spread it. */
static void embed(void* user, spillway_workers* workers) {
  const Visit* visit = user;
  Step* s = visit->step;
  (void)workers;
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kContext * kWidth; ++i)
      s->x[r][i] = visit->weight[s->rows[r][i / kWidth] * kWidth + i % kWidth];
  }
}

static void mix(void* user, spillway_workers* workers) {
  const Visit* visit = user;
  Step* s = visit->step;
  (void)workers;
  memset(s->h, 0, sizeof s->h);
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kContext * kWidth; ++i) s->h[r][i % kWidth] += visit->weight[i] * s->x[r][i];
  }
}

/* Logits, the loss, and the gradients of E as the head and of h. */
static void head(void* user, spillway_workers* workers) {
  const Visit* visit = user;
  Step* s = visit->step;
  float p[kBytes];
  (void)workers;
  memset(s->dhead, 0, sizeof s->dhead);
  memset(s->dh, 0, sizeof s->dh);
  s->loss = 0;
  for (int r = 0; r < kRows; ++r) {
    const int wanted = s->rows[r][kContext];
    float most = -INFINITY, sum = 0;
    for (int v = 0; v < kBytes; ++v) {
      p[v] = 0;
      for (int i = 0; i < kWidth; ++i) p[v] += visit->weight[v * kWidth + i] * s->h[r][i];
      most = fmaxf(most, p[v]);
    }
    for (int v = 0; v < kBytes; ++v) sum += p[v] = expf(p[v] - most);
    s->loss -= log(p[wanted] / sum) / kRows;
    for (int v = 0; v < kBytes; ++v) {
      const float d = (p[v] / sum - (float)(v == wanted)) / kRows;
      for (int i = 0; i < kWidth; ++i) {
        s->dhead[v][i] += d * s->h[r][i];
        s->dh[r][i] += d * visit->weight[v * kWidth + i];
      }
    }
  }
}

static void mix_backward(void* user, spillway_workers* workers) {
  const Visit* visit = user;
  Step* s = visit->step;
  (void)workers;
  memset(s->dmix, 0, sizeof s->dmix);
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kContext * kWidth; ++i) {
      s->dmix[i] += s->dh[r][i % kWidth] * s->x[r][i];
      s->x[r][i] = s->dh[r][i % kWidth] * visit->weight[i]; /* from here on x's gradient */
    }
  }
}

static void embed_backward(void* user, spillway_workers* workers) {
  const Visit* visit = user;
  Step* s = visit->step;
  (void)workers;
  memset(s->dembedding, 0, sizeof s->dembedding);
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kContext * kWidth; ++i) s->dembedding[s->rows[r][i / kWidth]][i % kWidth] += s->x[r][i];
  }
}
