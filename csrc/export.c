/* export.c: the number of finished ticks, where others can read it from outside.
 *
 * A memfd and not a file: it goes with the process, whatever ends it, and its name cannot be another's.
 * Whoever may look at the process (the same user, the same PTRACE_MODE_READ as for /proc/PID/smaps) finds
 * it in /proc/PID/fd. Not the counter itself is shared but a copy, made at each window's end: a tick pays
 * nothing, and a process that nobody watches has no descriptor more.
 */
#include "internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define SIZE ((size_t)4096)

typedef struct page {
    char magic[8];
    _Atomic uint64_t ended;
} page;

static _Atomic(page *) shown;
static int file = -1;
static const char MAGIC[8] = {'A', 'R', 'E', 'N', 'A', 't', 'k', '1'};

void arena__export_update(uint64_t ended) {
    page *to = ARENA__LOAD(shown);
    if (to) ARENA__STORE(to->ended, ended); /* two windows' ends may come in either order: 10 ticks */
}

#ifdef MFD_CLOEXEC
/* Another thread may be writing to the page before, if there is one: that one stays. */
static int show(void) {
    int made = memfd_create("arena-ticks", MFD_CLOEXEC);
    if (made < 0) return errno == ENOSYS ? ARENA_E_INVALID : ARENA_E_NOMEM;
    page *at = MAP_FAILED;
    if (ftruncate(made, (off_t)SIZE) == 0)
        at = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, made, 0);
    if (at == MAP_FAILED) {
        (void)close(made);
        return ARENA_E_NOMEM;
    }
    memcpy(at->magic, MAGIC, sizeof MAGIC);
    ARENA__STORE(at->ended, arena_ticks_ended());
    file = made;
    ARENA__STORE(shown, at);
    return ARENA_OK;
}

/* The program may have closed the descriptor, as daemons do, and the number may be another file's. */
static bool still_open(void) {
    static const char ours[] = "/memfd:arena-ticks";
    char name[64], target[64];
    (void)snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t size = readlink(name, target, sizeof target);
    return size >= (ssize_t)sizeof ours - 1 && memcmp(target, ours, sizeof ours - 1) == 0;
}

int arena_export_ticks(void) {
    arena__lock();
    int code = ARENA__LOAD(shown) && still_open() ? ARENA_OK : show();
    arena__unlock();
    return code == ARENA_OK ? code : arena__fail(code);
}

/* In the child: what it has inherited shows its parent's ticks, and would be written to by both. */
void arena__export_forked(void) {
    page *old = ARENA__LOAD(shown);
    if (!old) return;
    ARENA__STORE(shown, (page *)NULL);
    (void)munmap(old, SIZE);
    if (still_open()) (void)close(file);
    file = -1;
    (void)show();
}

__attribute__((constructor)) static void start(void) {
    const char *wanted = getenv("ARENA_EXPORT");
    if (wanted && strcmp(wanted, "1") == 0) (void)arena_export_ticks();
}
#else
int arena_export_ticks(void) {
    return arena__fail(ARENA_E_INVALID);
}

void arena__export_forked(void) {}
#endif
