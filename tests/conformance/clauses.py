"""What the contract says, case by case: the sentence that a failing case holds an engine to."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

CONTRACT = "1"
"""Of the contract that these sentences are from; it rises when one of them changes its meaning."""


class Clause(NamedTuple):
    """A sentence of the contract, and the section it stands in."""

    section: str
    text: str


# [section], sentences, and after each the cases that look at it.
_TEXT = """
[Verbs: pausing]
abort ends in-flight requests now, with finish reason abort and their partial tokens.
= pause_abort two_pauses_at_once samples_end_together_at_an_abort
= requests_that_end_while_they_are_aborted sleep_aborts_and_releases
wait lets in-flight requests finish. In every mode new requests are held, never started, until
generation opens.
= pause_wait resume_during_a_drain
keep freezes in-flight requests; they go on where they stood.
= pause_keep
Abort beats all; wait after keep lets the frozen finish; keep after wait freezes the rest.
= abort_beats_wait abort_beats_keep wait_after_keep_finishes keep_after_wait_freezes
Everything is idempotent. A paused engine makes no step.
= pause_when_idle
reject=True turns holding into a retryable error, for a replica that leaves the pool.
= reject_turns_requests_away
clear_cache=True: no later token comes from KV made before the pause. False: kept KV may be
reused, and the report counts the stale tokens. clear_cache is or-ed.
= clear_cache_forgets clear_cache_false_counts_stale_tokens new_requests_never_share_stale_kv

[Verbs: pauses have owners]
A caller's pause, sleep's pause and a sync's pause are separate; generation is open when none is
held. A caller's pause survives any wake.
= owners_do_not_open_for_each_other callers_pause_survives_a_wake sleep_survives_a_callers_resume
Sleep level 0 is a pause alone.
= sleep_level_0_is_a_pause
A held or frozen request waits at most the hold deadline, then ends with abort, its partial tokens
and a retryable error. When its replica is poisoned or lost this happens at once.
= held_requests_end_at_the_deadline frozen_requests_end_at_the_deadline poison_frees_who_waits

[Verbs: tags and modes]
A tag is weights or kv_cache; None is all, [] is nothing, unknown is an error. Over HTTP a bad
mode, level or tag is 422 and changes nothing.
= bad_tags_change_nothing bad_pause_modes_change_nothing bad_sleep_modes_change_nothing
= bad_levels_change_nothing

[Verbs: abort]
abort ends requests wherever they are, those asked for and no others; admission stays as it was.
= abort_leaves_admission_open abort_reaches_held_and_frozen dropping_the_stream_ends_the_request

[Verbs: generation]
Token ids in, token ids out; a request that cannot be meant is refused, and others go on.
= senseless_requests_are_refused samples_share_a_prompt stop_tokens_end_a_response
= stop_strings_end_a_response alternatives_come_with_each_token log_probs_are_log_probs
= a_seed_repeats_its_draws positional_draws_continue company_changes_nothing

[Verbs: caches]
reset_caches forgets what is computed from weights, by name; what is not declared is refused.
= caches_are_reset_by_name

[State]
One table for every engine: release(BACKUP) -> BACKED_UP(v), release(DISCARD) -> DISCARDED;
resume: BACKED_UP(v) -> RESIDENT(v), DISCARDED -> EMPTY. Everything is idempotent.
= walk_discard walk_backup walk_resident discard_drops_a_backup
= backup_after_discard_brings_nothing_back golden_after_a_backup_cycle
= memory_comes_back_in_stages_from_a_backup memory_comes_back_in_stages_from_nothing
= sleeping_twice_is_sleeping_once golden_after_a_discard_cycle
Never a token from EMPTY or DIRTY weights, whoever asks. When generation is open and something is
missing it raises WeightsNotLoaded, WeightsPoisoned or KVNotResident.
= discarded_weights_never_serve no_tokens_without_kv the_engine_itself_refuses
While a pause, a sleep or a sync is held, generate waits.
= half_awake_serves_nobody requests_during_a_sleep_are_held_and_served
= requests_that_come_during_an_update resume_waits_for_an_update
update_weights on BACKED_UP or DISCARDED raises WeightsNotResident before any byte moves.
= released_weights_take_no_update
release needs generation quiesced: no step running and none startable. With steps running it waits
up to the deadline, then RequestsInFlight, nothing released.
= release_waits_or_refuses kv_release_drains_first updates_wait_for_what_runs
Frozen requests are quiesced: they lose their KV and are recomputed after, and counted, or get it
back where that is declared.
= frozen_requests_survive_a_kv_release frozen_requests_survive_a_sleep
= frozen_requests_meet_new_weights_and_new_kv frozen_requests_get_their_kv_back
= frozen_requests_get_their_kv_back_with_the_weights saved_kv_dies_with_its_weights
= a_release_without_keep_drops_saved_kv
release_kv_cache: weights stay, addresses stay. KV content is never retained.
= golden_after_a_kv_only_release nothing_cached_survives_a_sleep
State that is not a parameter survives every cycle: after DISCARD and a full update the digest of
all state equals that after BACKUP and the same update.
= cycle_parity log_probs_survive_a_cycle

[State: memory]
release returns when the memory is back, measured; less than promised is ReleaseIncomplete.
= release_reports_what_it_freed twenty_cycles_are_flat backups_are_given_back
= discard_takes_no_host_memory
resume that runs out undoes what it mapped: ResumeOutOfMemory(tag, needed, free); a later resume
succeeds.
= a_resume_without_room_is_undone
Peak memory never exceeds engine weights and one bucket while the KV cache is away.
= the_peak_is_weights_and_a_bucket

[Versions]
A committed update moves the label last. Every token says its version; a finished request carries
spans that cover all its tokens.
= the_label_moves_last kept_request_continues_under_new_weights
= a_pinned_request_is_made_by_its_version_alone a_pinned_version_is_served_or_refused
Same version again: sent if content is missing or DIRTY, else verified and skipped.
= same_version_is_skipped same_version_is_sent_where_content_is_missing
A lower step needs a new incarnation: else it is refused.
= versions_only_rise a_discard_does_not_open_the_door

[Scope]
PARTIAL(base): fewer names, only over RESIDENT(base). A base that is not the resident one is
BaseMismatch.
= partial_updates partial_updates_need_their_base nothing_partial_over_nothing
= one_tensor_at_a_time deltas
A failed adapter update poisons that adapter only; an adapter needs the base it was made over.
= adapters_serve_who_asks adapters_need_their_base a_broken_adapter_poisons_itself_only
= adapters_survive_a_backup a_refused_adapter_changes_nothing

[Transfer]
The offer is checked before a byte is written: UnknownNames, IncompleteUpdate, ShapeMismatch,
BaseMismatch, wrong state; and refused whole.
= bad_offers_are_refused bad_offers_name_the_names label_and_offer_must_agree
= groups_that_take_no_update
Accept and commit are decisions of all ranks of a replica: no rank writes before all accepted.
= refused_by_another_rank another_rank_fails
Success means: everything in the manifest applied, fingerprints match, post-load processing ran
exactly once, older caches unusable. Zero of n applied is a failure.
= goldens_of_two_versions an_update_equals_a_fresh_engine updating_many_times
= every_group_moves_with_an_update bytes_are_the_ones_sent no_kv_outlives_its_weights
= nothing_sent_is_no_success verification_reads_memory digest_reads_what_lies_there
= a_planted_corruption_is_found without_fingerprints a_flipped_bit_is_named
Packing is exact: tensors larger than a bucket, odd sizes, 0-d and zero-size tensors, any order,
tied tensors (sent once, all names bound).
= any_bucket_size order_of_names_does_not_matter tied_tensors ties_that_the_engine_does_not_have

[Transfer: order]
Offer, accept, buckets, fingerprints, commit, with abort at any point instead; a control plane has
start, update, finish or abort in this order, and a step out of turn changes nothing.
= a_sender_is_asked_for_each_step_once an_update_in_steps finish_without_start
= a_start_is_finished_once

[Transfer: outcomes]
Refused or failed before a byte: unchanged. Failed after a byte: DIRTY, the replica is poisoned,
answers nobody, and is healed by a full resend, never a delta.
= hostile_senders sender_dies caller_gives_up the_old_version_heals nothing_partial_heals
= half_written_weights_are_not_backed_up an_update_error_leaves_the_server_answering
= a_sender_fails_in_each_phase an_engine_fails_in_each_phase

[Transfer: deadlines]
No wait is unbounded: every step has a deadline, enforced in the receiving process too.
= sender_hangs a_sender_hangs_in_each_phase an_engine_hangs_in_each_phase

[Transfer: outcomes]
Lost (hung or dead): only a restart heals; nobody waits for it for ever.
= an_engine_fails_in_a_memory_verb killed_and_started_anew

[Capabilities are honest]
Per verb NATIVE, EMULATED(how, cost) or UNSUPPORTED. UNSUPPORTED raises Unsupported and changes
nothing.
= emulations_say_how
"""


def _parsed() -> Iterator[tuple[str, Clause]]:
    section, text, said = "", "", False
    for line in _TEXT.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line.startswith("= "):
            said = True
            yield from ((case, Clause(section, text)) for case in line[2:].split())
        else:
            text, said = f"{'' if said else text} {line}".strip(), False


@cache
def _by_case() -> dict[str, Clause]:
    return dict(_parsed())


def clause_of(case: str) -> Clause | None:
    """What the contract says about it; None for a case of somebody else's."""
    return _by_case().get(case)


def clauses() -> dict[str, Clause]:
    """By case."""
    return dict(_by_case())
