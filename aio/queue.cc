#include "aio/queue.h"
