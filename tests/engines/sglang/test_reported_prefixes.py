"""Reported of other caches, tried on SGLang's real cache layer: how far a prefix is reused."""

import random

import pytest
from cache_layer import CORES, MAMBA, Traffic, plugin
from marks import Marked, has_mark, write_mark
from schedule_loop import serve
from scheduled import release, request
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.managers.schedule_policy import SchedulePolicy

POOLS = {
    "active": {},
    "int8": {"int8": True, "int8_slots": 64},
    "learned": {"policy": "learned"},
}
both_cores = pytest.mark.parametrize("core", CORES)
every_pool = pytest.mark.parametrize("pool", POOLS)


def words(rng, count):
    return [rng.randrange(3, 30_000) for _ in range(count)]


def made(core, pool, kind=Traffic, **options):
    with plugin(**{"policy": "gds", **POOLS[pool]}):
        return kind(core, **options)


# Where a prompt ends, and where a chunk does.


@both_cores
@every_pool
@pytest.mark.parametrize("chunk", [16, 64])
def test_a_longer_prompt_of_a_stream_resumes_at_the_end_of_the_shorter_one(core, pool, chunk):
    """After n tokens, n and more of the same stream, n around the first ends of a chunk.

    The same n resume at the last chunk end before them: their last token is computed anyway.
    """
    ours, alone = made(core, pool, slots=64), Traffic(core, slots=64)
    rng = random.Random(chunk)
    for n in (chunk - 1, chunk, chunk + 1, 3 * chunk - 1, 3 * chunk, 3 * chunk + 1):
        before = 0
        for more in (0, 1, 2, chunk - 1, chunk, chunk + 1):
            stream = words(rng, n + more)
            for traffic in (ours, alone):
                assert serve(traffic, stream[:n], chunk)[0] == 0
            hit, _ = serve(ours, stream, chunk)
            assert hit == (n if more else (n - 1) // chunk * chunk)
            assert hit >= serve(alone, stream, chunk)[0]
            assert hit >= before
            before = hit
    ours.check()


# What is still there.


@both_cores
@pytest.mark.parametrize("pool", ["active", "int8"])
def test_any_pattern_of_states_and_kv_at_four_places(core, pool, share):
    """All 256: a hit ends at the deepest state whose KV is there, and nothing breaks.

    SGLang drops KV from the end of a path, so what is missing first takes along what is behind it.
    """
    traffic = made(core, pool, kind=Marked, slots=16)
    for pattern in random.Random(1).sample(range(256), int(256 * share)):
        states = [bool(pattern >> bit & 1) for bit in range(4)]
        kv = [bool(pattern >> bit & 1) for bit in range(4, 8)]
        whole = kv.index(False) if False in kv else 4
        prompt = words(random.Random(pattern), 40)
        for end in (10, 20, 30, 40):
            traffic.run(prompt[:end])
        for at, kept in enumerate(states):
            if kept:
                traffic.hold(prompt[: 10 * (at + 1)])
        traffic.evict(states=4)
        while traffic.held:
            traffic.let_go()
        while (there := traffic.core.all_values_flatten().numel()) > 10 * whole:
            assert traffic.evict(kv_tokens=there - 10 * whole) is not None
        right = max((at + 1 for at in range(whole) if states[at]), default=0)
        assert traffic.hit([*prompt, 1]) == 10 * right
        assert traffic.run([*prompt, 1]) == 10 * right
        traffic.check()
        traffic.flush()


# Images: SGLang puts numbers made of an image's hash where its placeholders are.


def picture(name, length):
    item = MultimodalDataItem(modality=Modality.IMAGE)
    item.set_hash(int.from_bytes(name.encode()))
    return item.padding_sequence(length)


def prompt_of(text, images):
    """A text with images at (first token, tokens, name)."""
    tokens = list(text)
    for at, length, name in images:
        tokens[at : at + length] = picture(name, length)
    return tokens


@both_cores
@every_pool
@pytest.mark.parametrize("length", [1, 5, 40])
@pytest.mark.parametrize("at", [9, 10, 11, 39, 40, 79])
def test_another_image_ends_a_prefix_where_its_placeholders_begin(core, pool, at, length):
    """States every 10 tokens: the last one at or before the image serves, none behind it."""
    traffic = made(core, pool, kind=Marked, slots=64)
    text = words(random.Random(at), 125)
    prompts = [prompt_of(text, [(2, 3, "both"), (at, length, n)]) for n in ("cat", "dog")]
    cat, dog = prompts
    assert cat[:at] == dog[:at]
    assert not {*cat[at : at + length]} & {*dog[at : at + length]}
    for end in range(10, 121, 10):
        traffic.run(cat[:end])
    assert traffic.hit(cat) == 120
    assert traffic.hit(dog) == at // 10 * 10
    assert traffic.run(dog) == at // 10 * 10
    assert traffic.hit(cat) == 120
    traffic.check()


@both_cores
@every_pool
def test_a_chat_with_one_more_image_each_turn_goes_on_from_the_turn_before(core, pool):
    """Then once more with another third image: that turn resumes where the second one ended."""
    traffic = made(core, pool, kind=Marked, slots=64)
    text = words(random.Random(0), 240)
    places = [(5, 30), (45, 30), (90, 30), (140, 30), (190, 30)]
    for third, hits in (("c", [0, 40, 85, 130, 180]), ("other", [0, 40, 85, 130, 180])):
        images = [(*place, n) for place, n in zip(places, ["a", "b", third, "d", "e"], strict=True)]
        found = [
            traffic.run(prompt_of(text, images[: turn + 1])[:end])
            for turn, end in enumerate((40, 85, 130, 180, 230))
        ]
        # The second time the first two turns are sent again: the same prompts.
        assert found == (hits if third == "c" else [40, 85, *hits[2:]])
    traffic.check()


# Queues.


@both_cores
@every_pool
def test_equal_priorities_are_first_come_first_served(core, pool):
    """The same arrivals in both queues of SGLang: each request has the same hit."""
    found = []
    for by_priority in (False, True):
        traffic = made(core, pool, slots=16)
        policy = SchedulePolicy("fcfs", traffic.cache, False, by_priority, False)
        rng = random.Random(3)
        heads = [words(rng, 40) for _ in range(4)]
        hits = []
        for _ in range(20):
            queue = []
            for number in range(rng.randint(1, 6)):
                tokens = rng.choice(heads)[: rng.randint(10, 40)] + words(rng, rng.randint(1, 20))
                queue.append(request(tokens))
                queue[-1].priority = 5 if by_priority else None
                queue[-1].time_stats.wait_queue_entry_time = 1.0 + number
            if by_priority:
                rng_of_queue = random.Random(0)
                rng_of_queue.shuffle(queue)
            policy.calc_priority(queue)
            hits += [serve(traffic, list(req.origin_input_ids), 16)[0] for req in queue]
        assert any(hits)
        found.append(hits)
    assert found[0] == found[1]


# Pages.


def paged(traffic, tokens, tracked):
    """A request on pages that tracks its state after `tracked` tokens, in a chunk or at its end."""
    req = request(tokens)
    req.init_next_round_input(traffic.cache)
    req.lock = traffic.cache.lock(req.last_node)
    while traffic.requests.mamba_allocator.available_size() < 4:  # as the admission does
        traffic.evict(states=1)
    assert traffic.requests.alloc([req]) is not None
    hit, page = req.prefix_len, traffic.allocator.page_size
    row = traffic.requests.req_to_token[req.kv.req_pool_idx]
    row[:hit] = traffic.cache.path_device_indices(req.last_node)[:hit]
    fresh = traffic.kv_slots(-(-(len(tokens) - hit) // page) * page)
    row[hit : len(tokens)] = fresh[: len(tokens) - hit].to(row.dtype)
    for depth, is_end in tracked(hit):
        req.kv.mamba_last_track_idx = req.kv.mamba_next_track_idx
        slot = req.kv.mamba_ping_pong_track_buffer[req.kv.mamba_last_track_idx]
        req.kv.mamba_last_track_seqlen = depth
        write_mark(traffic, int(slot), tokens[:depth])
        if not is_end:
            traffic.cache.checkpoint(req, up_to=depth)
    release(traffic, req, len(tokens), cached=True)
    return hit


@both_cores
@pytest.mark.parametrize("pool", ["active", "int8"])
@pytest.mark.parametrize("page", [64, 512])
def test_no_node_of_pages_has_a_state_from_beyond_its_end(core, pool, page):
    """Prompts, prefixes and tracked depths off every grid, as where chunks do not end on pages.

    A key is cut to whole pages. A state that was tracked off them is of more tokens than the node
    it would lie in: it is not kept.
    """
    traffic = made(
        core, pool, slots=60, kv_tokens=60 * page, extra_buffer=True, page_size=page, longest=4096
    )
    rng = random.Random(page)
    known = [words(rng, rng.randint(1, 4 * page)) for _ in range(3)]
    kept = 0
    for number in range(60):
        prompt = rng.choice(known)[: rng.randint(1, 4 * page)] + words(rng, rng.randint(1, page))
        known[number % 3] = prompt

        def tracked(hit, prompt=prompt):
            grid = rng.choice([1, 64, page])
            depths = sorted(
                {hit + grid * rng.randint(1, 1 + len(prompt) // grid) for _ in range(2)}
            )
            inside = [depth for depth in depths if depth <= len(prompt)]
            return [(depth, depth == inside[-1]) for depth in inside]

        paged(traffic, prompt, tracked)
        for tokens in known:
            match = traffic.match(tokens)
            hit = match.device_prefix_len
            assert hit % page == 0
            if hit:
                kept += 1
                state = traffic.core.get_component_device_value(match.best_match_node, MAMBA)
                assert holds(traffic, state, tokens[:hit])
        traffic.check()
    assert kept > 20


def holds(traffic, state, tokens):
    checkpoints = traffic.requests.mamba_ckpt_pool
    if checkpoints is None:
        return has_mark(traffic, int(state), tokens)
    running = traffic.requests.mamba_allocator.alloc(1)
    checkpoints.load_to_active(None, state, running)
    traffic.requests.mamba_allocator.free(running)
    return has_mark(traffic, int(running), tokens)


@both_cores
@pytest.mark.parametrize("pool", ["active", "int8"])
@pytest.mark.parametrize(("page", "turn"), [(64, 35), (64, 535), (512, 100), (512, 535)])
def test_short_turns_lose_less_than_a_page_and_the_turn(core, pool, page, turn):
    """As in SGLang a turn tracks its state at its last whole page: the next one resumes there."""
    traffic = made(
        core, pool, slots=30, kv_tokens=16 * 512, extra_buffer=True, page_size=page, longest=4096
    )
    stream = words(random.Random(turn), 4_000)
    before = 0
    for length in range(700, 3_900, turn):

        def tracked(hit, length=length):
            depth = hit + (length - hit) // page * page
            return [(depth, True)] if depth > hit else []

        hit = paged(traffic, stream[:length], tracked)
        assert hit == before // page * page
        assert length - hit < page + max(turn, 700)
        before = length
    assert hit > 0
    traffic.check()
