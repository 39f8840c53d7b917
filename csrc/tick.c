/* tick.c: begin, end, nesting, cleanups, and what a thread knows about itself.
 *
 * Records of ticks come from pages of their own that are never unmapped. So a pointer to an ended
 * tick always points to a record, and a second end is an error code and not a crash. The price is
 * some 200 bytes for each tick that was ever open at the same time.
 */
#include "internal.h"

#include <pthread.h>

_Thread_local arena__thread arena__self ARENA__TLS;
arena_tick *(*arena__outer_current)(void);

static _Atomic uint64_t threads_named;
static _Atomic uint64_t ticks_begun;
static _Atomic uint64_t ticks_ended;
static _Atomic uint64_t requests_open; /* those of threads are counted by each thread */
static uint64_t fork_survivor; /* in the child of a fork: the one thread that is there, */
static uint64_t fork_named;    /* of those that had a name by then */
static arena_tick *spare_records; /* of threads that have ended; guarded by the pages lock */
static pthread_key_t thread_end;
static pthread_once_t thread_end_once = PTHREAD_ONCE_INIT;

/* A thread that ends with ticks open: those of its C stack end, and their records go to others. Those
 * of the Python types give up their memory, for only this thread could have ended them; what else
 * there is to an end (the cleanups) is done when their objects go. */
static void leave_thread(void *unused) {
    (void)unused;
    while (arena__self.top && arena_end(arena__self.top) == ARENA_OK) continue;
    arena__sweep(arena__self.id, false);
    arena_tick *last = arena__self.free;
    arena__self.registered = false;
    if (!last) return;
    while (last->below) last = last->below;
    arena__lock();
    last->below = spare_records;
    spare_records = arena__self.free;
    arena__unlock();
    arena__self.free = NULL;
}

static void make_key(void) {
    (void)pthread_key_create(&thread_end, leave_thread);
}

static void notice_end(void) {
    if (arena__self.registered) return;
    (void)pthread_once(&thread_end_once, make_key);
    (void)pthread_setspecific(thread_end, &arena__self);
    arena__self.registered = true;
}

uint64_t arena__name_thread(void) {
    notice_end();
    arena__self.id = ARENA__ADD(threads_named, 1) + 1;
    return arena__self.id;
}

#define SLAB ((size_t)64 << 10)

static ARENA__NOINLINE arena_tick *more_records(void) {
    notice_end();
    arena__lock();
    arena_tick *list = spare_records;
    spare_records = NULL;
    arena__unlock();
    if (!list) {
        arena_tick *slab = arena__system.map(SLAB);
        if (!slab && arena_trim(0)) slab = arena__system.map(SLAB);
        if (!slab) return NULL;
        for (size_t i = 0; i < SLAB / sizeof *slab; i++) {
            slab[i].below = list;
            list = &slab[i];
        }
    }
    arena__self.free = list;
    return list;
}

/* What a tick has from where it begins. */
static ARENA__NOINLINE void inherit(arena_tick *tick, arena_tick *around) {
    tick->wipe = around && around->wipe; /* a secret is one in the ticks inside, too */
    tick->inside = around && (around->inside || around->cap < ARENA__UNLIMITED);
    if (tick->inside) arena__make_strict(around);
    if (!tick->inside && !ARENA__LOAD(arena__counting) && !arena__checked()) return;
    tick->strict = true;
    ARENA__STORE(tick->top, (size_t)0);
    ARENA__STORE(tick->room, (size_t)0);
}

/* Opens a record whose memory is the caller's (zeroed, or a tick that was closed). `around` is the
 * open tick that it begins in, or NULL. */
void arena__tick_open(arena_tick *tick, arena_tick *around) {
    tick->inside = tick->strict = tick->wipe = false;
    tick->pos = tick->end = NULL;
    ARENA__STORE(tick->top, ARENA__UNLIMITED);
    ARENA__STORE(tick->room, ARENA__UNLIMITED);
    tick->cap = ARENA__UNLIMITED;
    tick->nested = 0;
    tick->current = tick->chunks = NULL;
    tick->grown = 0;
    tick->depth = tick->pool = 0;
    ARENA__STORE(tick->owner, arena__tid());
    tick->number = ARENA__ADD(ticks_begun, 1) + 1;
    tick->cleanups = NULL;
    tick->below = around;
    tick->detached = true;
    ARENA__STORE(tick->state, ARENA__OPEN);
    arena__self.open++;
    if (ARENA__UNLIKELY(around != NULL || ARENA__LOAD(arena__counting) || arena__checked()))
        inherit(tick, around);
}

/* What the requests of a group have in common. It is no tick: number 0, and never counted as one. */
void arena__group_init(arena__group *group, size_t limit) {
    memset(group, 0, sizeof *group);
    group->around.cap = limit;
    group->around.strict = true;
    ARENA__STORE(group->around.state, ARENA__OPEN);
}

/* As arena__tick_open, for a request. */
void arena__group_open(arena_tick *tick, arena__group *group) {
    arena__tick_open(tick, &group->around);
    arena__self.open--;
    ARENA__ADD(requests_open, 1);
    ARENA__STORE(tick->owner, ARENA__ANYONE);
    tick->group = group;
}

/* From here on the tick takes no more work, but what it holds can still be read. */
void arena__tick_ending(arena_tick *tick) {
    ARENA__STORE(tick->state, ARENA__ENDING);
    if (tick->current) tick->current->extent = (size_t)(tick->pos - (char *)tick->current);
    tick->end = tick->pos;
    arena__set_room(tick, arena__used(tick), 0);
}

static void over(arena_tick *tick, uint8_t state) {
    ARENA__STORE(tick->state, state);
    if (ARENA__UNLIKELY(tick->group != NULL))
        ARENA__SUB(requests_open, 1);
    else
        arena__self.open--;
    uint64_t ended = ARENA__ADD(ticks_ended, 1);
    if (ARENA__UNLIKELY(ended % ARENA__WINDOW == 0)) {
        arena__retention_roll();
        arena__export_update(ended + 1);
    }
}

static void shut(arena_tick *tick) {
    tick->pos = tick->end = NULL;
    ARENA__STORE(tick->room, (size_t)0);
    ARENA__STORE(tick->top, (size_t)0);
}

/* Runs the cleanups and gives the memory back. Returns how many chunks live views have pinned. */
size_t arena__tick_close(arena_tick *tick) {
    size_t pinned = 0;
    if (tick->cleanups) {
        if (arena__state(tick) == ARENA__OPEN) arena__tick_ending(tick);
        for (arena__cleanup *next; (next = tick->cleanups) != NULL;) {
            tick->cleanups = next->next;
            next->fn(next->arg);
        }
        /* What they left open may have cleanups that look at this tick's memory. */
        while (!tick->detached && arena__self.top != tick) (void)arena_end(arena__self.top);
    }
    if (ARENA__UNLIKELY(ARENA__LOAD(tick->owner) != arena__self.id && !tick->group)) {
        arena__close_foreign(tick);
        return 0;
    }
    if (tick->strict) arena__settle(tick);
    if (tick->chunks) pinned = arena__chunks_return(tick);
    if (ARENA__UNLIKELY(tick->log != NULL)) arena__log_drop(tick);
    shut(tick);
    over(tick, ARENA__ENDED);
    return pinned;
}

/* The end of a tick of the Python types that an audit keeps: over, but what it holds can still be
 * read, and even grow. It counts for no limit from here on. Returns how many chunks are pinned. */
size_t arena__tick_keep(arena_tick *tick) {
    if (arena__state(tick) == ARENA__OPEN) arena__tick_ending(tick);
    if (tick->strict) arena__settle(tick);
    size_t pinned = arena__chunks_keep(tick);
    over(tick, ARENA__KEPT);
    return pinned;
}

/* And when it is not kept any longer. From any thread that holds the GIL. */
void arena__tick_release(arena_tick *tick) {
    arena__chunks_release(tick);
    shut(tick);
    ARENA__STORE(tick->state, ARENA__ENDED);
}

/* By pages.c, under the lock: the tick has ended without its thread. */
void arena__tick_taken(arena_tick *tick) {
    shut(tick);
    ARENA__STORE(tick->state, ARENA__ENDED);
    if (!arena__tick_left_behind(tick)) ARENA__ADD(ticks_ended, 1);
}

/* In the child of a fork: whether the tick belongs to a thread that is not there. */
bool arena__tick_left_behind(const arena_tick *tick) {
    uint64_t owner = ARENA__LOAD(tick->owner);
    return owner <= fork_named && owner != fork_survivor;
}

void arena__ticks_forked(void) {
    fork_survivor = arena__self.id;
    fork_named = ARENA__LOAD(threads_named);
    ARENA__STORE(ticks_ended,
                 ARENA__LOAD(ticks_begun) - arena__self.open - ARENA__LOAD(requests_open));
}

arena_tick *arena_begin(const char *name) {
    arena_tick *tick = arena__self.free;
    if (!tick && !(tick = more_records())) {
        arena__fail(ARENA_E_NOMEM);
        return NULL;
    }
    arena__self.free = tick->below;
    arena__tick_open(tick, arena__self.top);
    tick->detached = false;
    arena__self.top = tick;
    tick->name[0] = '\0';
    if (name) {
        size_t length = strnlen(name, sizeof tick->name - 1);
        memcpy(tick->name, name, length);
        tick->name[length] = '\0';
    }
    if (ARENA__UNLIKELY(ARENA__LOAD(arena__named_pools))) tick->pool = arena__pool_of(tick->name);
    if (arena__traced()) {
        tick->depth = 1;
        tick->named = arena__name_turn(tick->name);
        tick->begun = arena__site_here();
        arena__make_strict(tick); /* each piece passes arena__take, which logs it */
    }
    return tick;
}

int arena_end(arena_tick *tick) {
    if (!tick) tick = arena__self.top;
    if (!tick || arena__is_over(tick)) return arena__fail(ARENA_E_ENDED);
    if (ARENA__LOAD(tick->owner) != arena__tid()) return arena__fail(ARENA_E_THREAD);
    if (tick->detached) return arena__fail(ARENA_E_INVALID);
    /* A cleanup that ends its own tick, or one around it. */
    for (arena_tick *inner = arena__self.top;; inner = inner->below) {
        if (arena__state(inner) == ARENA__ENDING) return arena__fail(ARENA_E_ENDING);
        if (inner == tick) break;
    }
    uint32_t here = tick->depth ? arena__site_here() : 0;
    for (arena_tick *inner = NULL; inner != tick;) {
        inner = arena__self.top;
        inner->over = here;
        (void)arena__tick_close(inner); /* a cleanup may begin and end ticks of its own */
        arena__self.top = inner->below;
        inner->below = arena__self.free;
        arena__self.free = inner;
    }
    return ARENA_OK;
}

/* The current tick: the innermost open one of this thread. The Python types keep their own order;
 * of the two candidates the one that began later is the inner one. */
arena_tick *arena_current(void) {
    arena_tick *tick = arena__self.top;
    if (!arena__outer_current) return tick;
    arena_tick *outer = arena__outer_current();
    return outer && (!tick || outer->number > tick->number) ? outer : tick;
}

/* The tick that an allocation goes to; NULL when it will be a stray. */
arena_tick *arena__pick(arena_tick *tick) {
    return ARENA__LIKELY(tick != NULL) ? tick : arena_current();
}

uint64_t arena_ticks_ended(void) {
    return ARENA__LOAD(ticks_ended);
}

uint64_t arena__ticks_begun(void) {
    return ARENA__LOAD(ticks_begun);
}

const char *arena_name(const arena_tick *tick) {
    return tick ? tick->name : "";
}

uint64_t arena_number(const arena_tick *tick) {
    return tick ? tick->number : 0;
}

size_t arena_used(const arena_tick *tick) {
    return tick ? arena__used(tick) : 0;
}

int arena_wipe(arena_tick *tick) {
    tick = arena__pick(tick);
    if (!tick) return arena__fail(ARENA_E_ENDED);
    int code = arena__may_change(tick);
    if (code == ARENA_OK) tick->wipe = true;
    return code;
}

int arena_cleanup(arena_tick *tick, arena_cleanup_fn fn, void *arg) {
    tick = arena__pick(tick);
    if (!tick) return arena__fail(ARENA_E_ENDED);
    int code = arena__may_change(tick);
    if (code != ARENA_OK) return code;
    if (!fn) return arena__fail(ARENA_E_INVALID);
    arena__chunk *chunk;
    arena__cleanup *cleanup = arena__take(tick, sizeof *cleanup, &chunk);
    if (!cleanup) return arena__fail(ARENA_E_NOMEM);
    *cleanup = (arena__cleanup){tick->cleanups, fn, arg};
    tick->cleanups = cleanup;
    return ARENA_OK;
}

int arena_error(void) {
    return arena__self.error;
}

const char *arena_version(void) {
    return ARENA_VERSION;
}

const char *arena_strerror(int code) {
    switch (code) {
    case ARENA_OK: return "no error";
    case ARENA_E_NOMEM: return "the operating system gave no memory";
    case ARENA_E_LIMIT: return "a limit would be passed";
    case ARENA_E_ENDED: return "the tick is not open";
    case ARENA_E_THREAD: return "the tick belongs to another thread";
    case ARENA_E_ENDING: return "the tick is ending: its cleanups are running";
    case ARENA_E_INVALID: return "an argument is out of range";
    default: return "unknown code";
    }
}

void arena__tick_stats(arena_stats *out) {
    /* Ended before begun: a tick that begins and ends in between must not make `open` negative. */
    out->ticks_ended = ARENA__LOAD(ticks_ended);
    out->ticks_begun = ARENA__LOAD(ticks_begun);
    out->ticks_open = out->ticks_begun - out->ticks_ended;
}

void arena_stats_get(arena_stats *out) {
    if (!out) return;
    memset(out, 0, sizeof *out);
    arena__tick_stats(out);
    arena__pages_stats(out);
    arena__persist_stats(out);
    arena__limit_stats(out);
}
