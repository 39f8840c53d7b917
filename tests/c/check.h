/* check.h: what the tests of the C core share. */
#ifndef ARENA_TESTS_CHECK_H
#define ARENA_TESTS_CHECK_H

#include "../../csrc/internal.h"

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                          \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                       \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

#define RUN(test) (test(), printf("ok %s\n", #test))

static inline arena_stats stats(void) {
    arena_stats s;
    arena_stats_get(&s);
    return s;
}

#endif
