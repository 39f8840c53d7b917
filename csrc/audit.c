/* audit.c: the memory of ended C ticks, kept and watched, so that a loop can be wrapped before it is
 * known what escapes.
 *
 * A tick that ends is buried: its chunks become inaccessible, and its grave remembers which tick it was
 * and which piece came from where. Whoever touches one is stopped by the processor; the handler notes
 * the place, makes that page accessible again and lets the access go on. So the program reads the true
 * old bytes, once for each page it is told, and what it did is in the map. Graves are opened, oldest
 * first, when more than the budget is kept.
 *
 * The handler may run in any thread at any instruction, so it takes no lock and allocates nothing: it
 * reads a table of ranges, and writes into a table of touches, which arena__audit_drain turns into
 * rows. The ticks of the Python types need none of this: see csrc/python/audit.c.
 */
#include "internal.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __linux__
#include <ucontext.h>
#endif

enum { RANGES = 1 << 15, TOUCHES = 1024 };
#define DEFAULT_BUDGET ((size_t)256 << 20)

typedef struct piece {
    uintptr_t data;
    size_t size;
    uint32_t at;
} piece;

struct arena__log {
    uint32_t count, room;
    piece pieces[];
};

typedef struct grave {
    struct grave *next; /* a younger one */
    arena_tick tick;    /* as it was: number, name, sites */
    struct arena__log *log;
    size_t size;
    uint32_t first, count; /* its ranges: from `first` on, round the table */
} grave;

_Atomic size_t arena__budget;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* before the sites lock */
static grave *oldest, *youngest;
static size_t page = 4096;
static struct sigaction before[2];
static bool handling;

/* The ranges of all graves, in a ring, oldest first. start == 0: none. */
static struct {
    _Atomic uintptr_t start;
    _Atomic size_t size;
    uint64_t tick;
} ranges[RANGES];
static uint32_t ranges_first, ranges_count;

static struct {
    uintptr_t address, code;
    _Atomic bool ready;
} touches[TOUCHES];
static _Atomic uint32_t touched, drained;

/* ---- The handler ----------------------------------------------------------------------------- */

static uintptr_t code_of(void *context) {
#if defined(__linux__) && defined(__x86_64__)
    return (uintptr_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__linux__) && defined(__aarch64__)
    return (uintptr_t)((ucontext_t *)context)->uc_mcontext.pc;
#else
    (void)context;
    return 0;
#endif
}

static bool is_buried(uintptr_t address) {
    for (uint32_t i = 0; i < RANGES; i++) {
        uintptr_t start = ARENA__LOAD(ranges[i].start);
        if (start && address >= start && address - start < ARENA__LOAD(ranges[i].size)) return true;
    }
    return false;
}

static void pass_on(int number, siginfo_t *info, void *context) {
    const struct sigaction *old = &before[number == SIGBUS];
    if (old->sa_flags & SA_SIGINFO) {
        old->sa_sigaction(number, info, context);
    } else if (old->sa_handler != SIG_DFL && old->sa_handler != SIG_IGN) {
        old->sa_handler(number);
    } else if (info->si_code > 0) { /* the fault comes again, and ends the process as it would have */
        (void)sigaction(number, old, NULL);
    } else if (old->sa_handler == SIG_DFL) { /* somebody sent it, once */
        (void)sigaction(number, old, NULL);
        (void)raise(number);
    }
}

static void fault(int number, siginfo_t *info, void *context) {
    uintptr_t address = (uintptr_t)info->si_addr, start = address & ~(page - 1);
    if (info->si_code <= 0 || !is_buried(address) ||
        mprotect((void *)start, page, PROT_READ | PROT_WRITE) != 0) {
        pass_on(number, info, context);
        return;
    }
    uint32_t at = ARENA__LOAD(touched);
    do {
        if (at - ARENA__LOAD(drained) >= TOUCHES) return; /* too many to note all of them */
    } while (!atomic_compare_exchange_weak(&touched, &at, at + 1));
    touches[at % TOUCHES].address = address;
    touches[at % TOUCHES].code = code_of(context);
    atomic_store_explicit(&touches[at % TOUCHES].ready, true, memory_order_release);
}

static void handle_faults(void) {
    struct sigaction ours = {.sa_sigaction = fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    long size = sysconf(_SC_PAGESIZE);
    if (handling) return;
    if (size > 0) page = (size_t)size;
    (void)sigemptyset(&ours.sa_mask);
    handling = sigaction(SIGSEGV, &ours, &before[0]) == 0 && sigaction(SIGBUS, &ours, &before[1]) == 0;
}

/* ---- What was touched ------------------------------------------------------------------------ */

/* The place of an instruction: the function when its object tells, else where it lies in the file,
 * which addr2line turns into a line. */
static uint32_t site_of_code(uintptr_t code) {
    char function[64];
    Dl_info info = {0};
    uint32_t number = arena__site_find(&code, 1);
    if (number || !code) return number;
    if (!dladdr((void *)code, &info) || !info.dli_fname) info.dli_fname = "?";
    (void)snprintf(function, sizeof function, "%s+0x%zx", info.dli_sname ? info.dli_sname : "",
                   (size_t)(code - (uintptr_t)(info.dli_sname ? info.dli_saddr : info.dli_fbase)));
    arena_frame frame = {info.dli_fname, function, 0};
    return arena__site_add(&code, 1, &frame, 1);
}

static const grave *grave_of(uintptr_t address) {
    for (const grave *g = oldest; g; g = g->next)
        for (uint32_t i = 0; i < g->count; i++) {
            uint32_t at = (g->first + i) % RANGES;
            if (address - ranges[at].start < ranges[at].size) return g;
        }
    return NULL;
}

static uint32_t source_of(const grave *g, uintptr_t address) {
    for (uint32_t i = 0; g->log && i < g->log->count; i++)
        if (address - g->log->pieces[i].data < g->log->pieces[i].size)
            return g->log->pieces[i].at ? g->log->pieces[i].at : g->tick.begun;
    return g->tick.begun; /* between two pieces, or not logged */
}

static void drain_locked(void) {
    while (ARENA__LOAD(drained) != ARENA__LOAD(touched)) {
        uint32_t at = ARENA__LOAD(drained) % TOUCHES;
        if (!atomic_load_explicit(&touches[at].ready, memory_order_acquire)) return;
        uintptr_t address = touches[at].address;
        const grave *g = grave_of(address);
        if (g) (void)arena__row_use(source_of(g, address), site_of_code(touches[at].code), &g->tick);
        ARENA__STORE(touches[at].ready, false);
        ARENA__ADD(drained, 1);
    }
}

void arena__audit_drain(void) {
    (void)pthread_mutex_lock(&lock);
    drain_locked();
    (void)pthread_mutex_unlock(&lock);
}

/* ---- Graves ---------------------------------------------------------------------------------- */

/* Under the lock: the oldest one goes, its memory to the system. */
static void open_oldest(void) {
    grave *g = oldest;
    drain_locked(); /* while it can still be said whose the touched memory was */
    oldest = g->next;
    if (!oldest) youngest = NULL;
    for (uint32_t i = 0; i < g->count; i++) {
        uint32_t at = (g->first + i) % RANGES;
        char *start = (char *)ARENA__LOAD(ranges[at].start);
        ARENA__STORE(ranges[at].start, (uintptr_t)0);
        arena__pages_unmap(start, ARENA__LOAD(ranges[at].size));
    }
    ranges_first = (g->first + g->count) % RANGES;
    ranges_count -= g->count;
    arena__quarantine_sub(g->size);
    arena__system.release(g->log);
    arena__system.release(g);
}

static void open_beyond(size_t budget) {
    while (oldest && arena__quarantined() > budget) open_oldest();
}

/* The chunks of a C tick that ends; nobody uses them. */
void arena__bury(arena_tick *tick, arena__chunk *chunks) {
    uint32_t count = 0;
    size_t size;
    char *start;
    for (arena__chunk *chunk = chunks; chunk; chunk = chunk->next) count++;
    grave *g = count <= RANGES ? arena__system.resize(NULL, sizeof *g) : NULL;
    if (!g) { /* no memory: it ends as it would have */
        arena__chunks_discard(chunks);
        return;
    }
    (void)pthread_mutex_lock(&lock);
    while (ranges_count + count > RANGES) open_oldest();
    *g = (grave){NULL, *tick, tick->log, 0, (ranges_first + ranges_count) % RANGES, count};
    tick->log = NULL;
    for (uint32_t at = g->first; chunks; at = (at + 1) % RANGES) {
        arena__chunk *next = chunks->next;
        if (arena__checked()) arena__check_open(chunks, chunks->size);
        arena__span_of(chunks, &start, &size);
        ARENA__STORE(ranges[at].size, size);
        ARENA__STORE(ranges[at].start, (uintptr_t)start);
        (void)mprotect(start, size, PROT_NONE); /* where it fails nobody is told, but nobody is harmed */
        g->size += size;
        chunks = next;
    }
    ranges_count += count;
    arena__quarantine_add(g->size);
    if (youngest)
        youngest->next = g;
    else
        oldest = g;
    youngest = g;
    open_beyond(ARENA__LOAD(arena__budget));
    (void)pthread_mutex_unlock(&lock);
}

/* ---- Where pieces come from ------------------------------------------------------------------ */

/* Of a C tick only: the handles of the Python types know it themselves. Without memory the piece is
 * not in the log. */
void arena__log(arena_tick *tick, const void *data, size_t size) {
    if (tick->detached) return;
    uint32_t at = arena__site_here();
    struct arena__log *log = tick->log;
    if (!ARENA__LOAD(arena__budget)) return;
    if (!log || log->count == log->room) {
        uint32_t room = log ? log->room * 2 : 32;
        struct arena__log *more = arena__system.resize(log, sizeof *log + room * sizeof(piece));
        if (!more) return;
        if (!log) more->count = 0;
        more->room = room;
        tick->log = log = more;
    }
    log->pieces[log->count++] = (piece){(uintptr_t)data, size, at};
}

void arena__log_drop(arena_tick *tick) {
    arena__system.release(tick->log);
    tick->log = NULL;
}

/* ---- For users ------------------------------------------------------------------------------- */

int arena_audit(size_t budget) {
    if (budget && !arena_tracing() && arena_trace(1) < 0) return ARENA_E_NOMEM;
    (void)pthread_mutex_lock(&lock);
    if (budget) handle_faults();
    ARENA__STORE(arena__budget, budget);
    open_beyond(budget);
    (void)pthread_mutex_unlock(&lock);
    return ARENA_OK;
}

size_t arena_audit_now(void) {
    return ARENA__LOAD(arena__budget);
}

/* What ARENA_AUDIT says: 0 for nothing, "" or "0"; SIZE_MAX when it makes no sense. */
size_t arena_audit_words(const char *words) {
    char *end;
    if (!words || !*words) return 0;
    if (*words < '0' || *words > '9') return SIZE_MAX;
    unsigned long long value = strtoull(words, &end, 10);
    if (*end || value >= ARENA__UNLIMITED) return SIZE_MAX;
    return value == 1 ? DEFAULT_BUDGET : (size_t)value;
}

void arena__audit_forking(void) {
    (void)pthread_mutex_lock(&lock);
}

void arena__audit_forked(void) {
    (void)pthread_mutex_unlock(&lock);
}
