/* limit.c: who may ask for how many bytes: a tick's own limit, those around it, the process's.
 *
 * A tick with a limit of its own and nothing else needs no code here: its `room` says what is left,
 * and the fast path compares with it. Everything else makes a tick strict: its room stays 0, each
 * request comes here and is decided against every limit that it falls under. A strict request costs
 * some 20 ns more. The other way, lending an inner tick a share of the outer one's room, keeps the
 * fast path; but then the outer tick can be refused what it has only lent, and a limit is no longer
 * exact to the byte.
 *
 *   used    what a tick's callers asked for: top - room
 *   nested  what those of the ticks inside asked for, and still hold; the tick is then strict too
 *   cap     the limit: used + nested <= cap
 *   held    in the process: by strict ticks, persisted memory and strays
 */
#include "internal.h"

static _Atomic size_t held;
static _Atomic size_t process_limit = ARENA__UNLIMITED;
_Atomic bool arena__counting; /* the process has had a limit: every tick is strict */

/* For calls that change the tick, but ask for nothing. */
int arena__may_change(const arena_tick *tick) {
    uint8_t state = arena__state(tick);
    if (state == ARENA__OPEN || state == ARENA__KEPT) return ARENA_OK;
    return arena__fail(state == ARENA__ENDED ? ARENA_E_ENDED : ARENA_E_ENDING);
}

static ARENA__NOINLINE int refuse(const arena_tick *by, size_t size, size_t used, size_t limit) {
    if (limit >= ARENA__UNLIMITED) return arena__fail(ARENA_E_NOMEM);
    arena__self.refusal.by = by;
    arena__self.refusal.size = size;
    arena__self.refusal.used = used;
    arena__self.refusal.limit = limit;
    return arena__fail(ARENA_E_LIMIT);
}

/* Takes `size` bytes of what the process may hold, in one step for all threads. */
static int hold(size_t size) {
    size_t now = ARENA__LOAD(held);
    do {
        size_t limit = ARENA__LOAD(process_limit);
        if (now > limit || size > limit - now) return refuse(NULL, size, now, limit);
    } while (!atomic_compare_exchange_weak_explicit(&held, &now, now + size, memory_order_relaxed,
                                                    memory_order_relaxed));
    return ARENA_OK;
}

static int within(const arena_tick *tick, size_t size) {
    size_t used = arena__used(tick) + tick->nested;
    return size <= tick->cap - used ? ARENA_OK : refuse(tick, size, used, tick->cap);
}

/* The next open tick around `tick` that its bytes count for. */
static arena_tick *around(const arena_tick *tick) {
    arena_tick *outer = tick->inside ? tick->below : NULL;
    while (outer && arena__state(outer) != ARENA__OPEN) outer = outer->below;
    return outer;
}

static arena_tick *beyond(const arena_tick *outer) {
    arena_tick *next = outer->below;
    while (next && arena__state(next) != ARENA__OPEN) next = next->below;
    return next;
}

/* Both at once for whoever reads the counters, which look at the ticks that hold chunks. */
void arena__set_room(arena_tick *tick, size_t top, size_t room) {
    bool listed = tick->chunks != NULL;
    if (listed) arena__lock();
    ARENA__STORE(tick->top, top);
    ARENA__STORE(tick->room, room);
    if (listed) arena__unlock();
}

static void add_nested(const arena_tick *tick, size_t size) {
    for (arena_tick *outer = around(tick); outer; outer = beyond(outer)) outer->nested += size;
}

static void sub_nested(const arena_tick *tick, size_t size) {
    for (arena_tick *outer = around(tick); outer; outer = beyond(outer)) outer->nested -= size;
}

void arena__make_strict(arena_tick *tick) {
    if (tick->strict) return;
    size_t used = arena__used(tick);
    tick->strict = true;
    arena__set_room(tick, used, 0);
    ARENA__ADD(held, used);
}

static void make_strict_locked(arena_tick *tick) {
    if (tick->strict) return;
    size_t used = arena__used(tick);
    tick->strict = true;
    ARENA__STORE(tick->top, used);
    ARENA__STORE(tick->room, (size_t)0);
    ARENA__ADD(held, used);
}

int arena__claim(arena_tick *tick, size_t size) {
    int code = arena__may_change(tick);
    if (code != ARENA_OK) return code;
    if (arena__state(tick) == ARENA__KEPT) return ARENA_OK; /* it counts for nobody any more */
    if (ARENA__LOAD(arena__counting)) arena__make_strict(tick);
    if ((code = within(tick, size)) != ARENA_OK) return code;
    if (!tick->strict) {
        arena__charge(tick, size);
        return ARENA_OK;
    }
    for (arena_tick *outer = around(tick); outer; outer = beyond(outer))
        if ((code = within(outer, size)) != ARENA_OK) return code;
    if ((code = hold(size)) != ARENA_OK) return code;
    ARENA__STORE(tick->top, ARENA__LOAD(tick->top) + size);
    add_nested(tick, size);
    return ARENA_OK;
}

void arena__refund(arena_tick *tick, size_t size) {
    if (arena__state(tick) == ARENA__KEPT) return;
    if (!tick->strict) {
        ARENA__STORE(tick->room, ARENA__LOAD(tick->room) + size);
        return;
    }
    ARENA__STORE(tick->top, ARENA__LOAD(tick->top) - size);
    ARENA__SUB(held, size);
    sub_nested(tick, size);
}

/* A tick goes: what it asked for counts for nobody any more. */
void arena__settle(arena_tick *tick) {
    if (!tick->strict) return;
    arena__settle_held(tick);
    sub_nested(tick, arena__used(tick));
}

/* The same where the ticks around it go too, and must not be touched. */
void arena__settle_held(const arena_tick *tick) {
    if (tick->strict) ARENA__SUB(held, arena__used(tick));
}

int arena__claim_persist(size_t size) {
    return hold(size);
}

void arena__refund_persist(size_t size) {
    ARENA__SUB(held, size);
}

/* In the child of a fork, where another thread may have been between two of these steps. */
void arena__held_forked(size_t strict) {
    arena_stats now = {0};
    arena__persist_stats(&now);
    ARENA__STORE(held, strict + now.persisted + now.strays);
}

/* The limit of a tick that nothing has been begun in. */
int arena__cap(arena_tick *tick, size_t bytes) {
    if (bytes > ARENA__UNLIMITED) bytes = ARENA__UNLIMITED;
    size_t used = arena__used(tick);
    if (bytes < used + tick->nested) return arena__fail(ARENA_E_INVALID);
    tick->cap = bytes;
    if (!tick->strict) arena__set_room(tick, bytes, bytes - used);
    return ARENA_OK;
}

int arena_limit(arena_tick *tick, size_t bytes) {
    tick = arena__pick(tick);
    if (!tick) return arena__fail(ARENA_E_ENDED);
    int code = arena__may_change(tick);
    if (code != ARENA_OK) return code;
    /* Ticks may be open inside. Those on C's own stack can be found, and count from now on. */
    if (tick->detached || tick != arena__self.top) arena__make_strict(tick);
    if (!tick->detached)
        for (arena_tick *inner = arena__self.top; inner && inner != tick; inner = inner->below) {
            if (inner->inside) continue; /* one that is ending still holds what it holds */
            arena__make_strict(inner);
            inner->inside = true;
            add_nested(inner, arena__used(inner));
        }
    return arena__cap(tick, bytes);
}

int arena__process_limit(size_t bytes, bool detached_too) {
    if (bytes >= ARENA__UNLIMITED) {
        ARENA__STORE(process_limit, ARENA__UNLIMITED);
        return ARENA_OK;
    }
    ARENA__STORE(arena__counting, true);
    arena__each_open(detached_too, make_strict_locked);
    if (ARENA__LOAD(held) > bytes) return arena__fail(ARENA_E_INVALID);
    ARENA__STORE(process_limit, bytes);
    return ARENA_OK;
}

int arena_process_limit(size_t bytes) {
    return arena__process_limit(bytes, false);
}

void arena__limit_stats(arena_stats *out) {
    size_t limit = ARENA__LOAD(process_limit);
    out->limit = limit < ARENA__UNLIMITED ? limit : UINT64_MAX;
}
