"""The contract of schemes: the duties of every scheme, as a list of checks.

delivery: send_applies, several_workers, late_joiner_gets_what_was_sent, no_first_weights,
forms_of_weights, changed_source, worker_ids, per_worker_weights, parts, parts_for_a_late_joiner,
everything_travels, nothing_is_aliased, kept_values, kept_buffers, state_of_a_worker,
state_behind_a_transform, graph_of_a_version, sends_at_once, no_time_to_wait_for_the_lag,
wire_dtype, wire_dtype_of_statistics, two_models.

failures: refused_shape, refused_names, refused_halfway, refused_before_the_end,
refused_first_weights, other_model, index_taken, require, nobody_comes, dead_worker, dead_trainer,
dead_before_connect, killed_worker, stopped_worker, slow_worker, send_timeout, handles.

reading: receive, wait_for_version, manual_apply, refused_by_manual_apply, apply_weights,
apply_weights_of_another_worker, calls_that_give_up, wait_staged, wait_staged_names_the_dead,
calls_in_a_loop, update_waits_for_reader, update_waits_for_forward, read_waits_for_update,
waiting_inside_a_read, torn_reads, pull, pull_of_a_subscriber.

spans: version_of_a_block, spans, spans_of_tasks_and_threads, first_version, last_read,
weights_by_hand, last_read_of_tasks_and_threads.

lifetime: context_passes_on, context_that_loads_its_own_model, context_sends_on, cut_link,
other_trainer, worker_before_trainer, worker_comes_again, leaving_is_not_dying, last_worker_died,
rolling_restart, restarted_trainer, replaced_model, replaced_while_read, late_model, context,
plain_weights, pickling, wrong_order, wrong_arguments, close_in_each_state, close_wakes,
cancelled_tasks, memory_stays, nothing_is_left.

cancelling: cancel_send, cancelled_send_goes_on, cancelled_send_that_failed,
cancelled_send_that_was_refused, cancelled_send_beside_one_that_told,
cancelled_send_as_a_worker_is_back, cancelled_send_that_still_copies, cancel_receive,
cancel_connect, cancel_connect_of_a_worker, cancel_close.

changing: steps_beside_a_send, steps_in_a_thread, writes_beside_a_send, a_step_that_raised.

costs: stats, observers, observed_refusals, observer_raises, bounded_lag, lag_by_hand,
bytes, lag_of_the_dead.

The suite works with any test-runner: ``await check.run(factory, hooks)`` for each of
:data:`tests.contract.suite.CONTRACT_CHECKS`. The modules of checks import neither pytest nor a
private name. ``test_*.py`` run all checks over shared memory, pipes and TCP, and those of
:data:`tests.contract.suite.ANYWHERE` over process groups (and RPC and Ray, in tests/schemes). The
first line of a check's docstring is the statement that it tests.
"""
