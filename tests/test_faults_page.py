"""Every row of docs/faults.md has tests."""

import re
from pathlib import Path

import pytest
from helpers.paths import ROOT

ABLATE, CELLS, TRAINING = "ablate/test_faults.py", "cells/test_ranks.py", "training/test_faults.py"
RUNNER, LOCK, FOLDER = "ablate/test_runner.py", "cells/test_lock.py", "training/test_cell_folder.py"
NODES = "cells/test_nodes.py"
INPUTS, CHANGES = "cells/test_inputs.py", "ablate/test_code_changes.py"
RESUME, DAMAGED = "training/test_resume.py", "report/test_faulty_records.py"
OUTPUT, RERUN = "ablate/test_output_faults.py", "ablate/test_rerun.py"
FIRST_STEP = "training/test_first_step.py"
PROCESS, CLI, LAUNCH = "cells/test_cell_process.py", "ablate/test_cli.py", "ablate/test_launch.py"

TESTS: dict[str, list[tuple[str, str]]] = {
    "a cell or one of its data workers is killed": [
        (ABLATE, "test_a_killed_cell_is_retried_a_limited_number_of_times"),
        (ABLATE, "test_the_delay_doubles_with_each_retry"),
        (TRAINING, "test_six_kills_change_no_table"),
        (TRAINING, "test_the_loss_of_a_data_worker_is_retried"),
    ],
    "one rank of a cell on several devices is killed": [
        (CELLS, "test_the_first_failed_rank_is_named"),
        (CELLS, "test_kill_9_of_any_process_leaves_none"),
        (
            "training/test_sharded_cells.py",
            "test_a_rank_killed_during_a_checkpoint_loses_nothing",
        ),
    ],
    "one rank of a cell on several devices fails": [
        (CELLS, "test_the_first_failed_rank_is_named"),
        (CELLS, "test_failures_of_ranks_are_classified_from_the_log"),
        (CELLS, "test_a_rank_that_exits_early_with_0_failed_first"),
    ],
    "a node of a cell on several nodes is lost": [
        (NODES, "test_the_rank_that_failed_first_is_named_with_its_node"),
        (NODES, "test_a_node_that_srun_waits_for_is_lost"),
        (NODES, "test_a_silent_node_is_lost_while_another_one_answers"),
        (
            "slurm/test_nodes.py",
            "test_two_nodes_give_the_metrics_of_one_and_a_lost_node_is_replaced",
        ),
    ],
    "a cell receives SIGTERM": [
        (CELLS, "test_sigterm_reaches_every_rank_and_is_no_failure"),
        (RESUME, "test_a_second_sigterm_does_not_prevent_the_checkpoint"),
    ],
    "the runner is killed": [(RUNNER, "test_cells_end_with_a_killed_runner")],
    "the fork server": [
        (ABLATE, "test_cells_of_a_killed_fork_server_are_retried"),
        (LAUNCH, "test_a_server_killed_while_it_imports_is_replaced"),
        (CELLS, "test_a_cell_that_exits_with_the_code_of_a_lost_server_has_failed"),
    ],
    "two cells of different variants end with the same exception": [
        (ABLATE, "test_a_study_ends_after_the_same_exception_in_two_variants"),
        (ABLATE, "test_a_study_without_a_result_ends_after_the_same_exception_in_two_seeds"),
    ],
    "one training step or one evaluation batch of a variant fails": [
        (FIRST_STEP, "test_a_mistake_in_an_own_task_is_one_line"),
        (FIRST_STEP, "test_a_measure_that_is_not_logged_is_found"),
        (FIRST_STEP, "test_the_first_module_that_is_not_finite_is_named"),
        (FIRST_STEP, "test_a_study_with_a_wrong_task_starts_no_cell"),
    ],
    "Ctrl-C, also before": [
        (RUNNER, "test_an_interrupt_lets_running_cells_finish"),
        (LAUNCH, "test_an_interrupt_during_the_start_of_the_server_drains"),
    ],
    "Ctrl-C twice": [
        (RUNNER, "test_a_second_interrupt_stops_cells_and_a_third_kills_them"),
        (RUNNER, "test_a_signal_to_the_process_group_lets_cells_save"),
    ],
    "Ctrl-C three times": [(RUNNER, "test_a_second_interrupt_stops_cells_and_a_third_kills_them")],
    "a cell completes no step": [
        (ABLATE, "test_a_hang_is_killed_with_its_stack_in_the_log_and_retried_once"),
        (CELLS, "test_a_hang_leaves_every_ranks_stack"),
    ],
    "a loss is not finite": [
        ("training/test_cells.py", "test_a_non_finite_loss_stops_training_before_the_update"),
        (
            "training/test_undefined_metrics.py",
            "test_a_metric_that_is_not_finite_at_the_end_has_diverged",
        ),
        (RERUN, "test_rerun_starts_failed_cells_afresh_and_a_run_skips_diverged_ones"),
    ],
    "no memory on the host or the GPU": [
        (RUNNER, "test_a_cell_that_runs_out_of_memory_names_what_helps"),
    ],
    "the disk is full": [
        (ABLATE, "test_a_full_disk_is_no_space"),
        (ABLATE, "test_a_failure_is_recorded_as_soon_as_the_disk_has_space"),
        (LOCK, "test_a_full_disk_leaves_no_temporary_lock"),
        (TRAINING, "test_a_disk_that_fills_up_costs_no_result"),
    ],
    "checkpoints cannot be written": [
        (RESUME, "test_a_checkpoint_that_was_not_written_is_an_error"),
        (TRAINING, "test_failures_of_training_have_their_classes"),
    ],
    "a checkpoint is damaged": [
        (RESUME, "test_a_torn_checkpoint_is_replaced_by_the_previous_one"),
        (FOLDER, "test_a_checkpoint_with_other_bits_is_set_aside"),
    ],
    "the metrics file ends": [
        ("cells/test_records.py", "test_only_torn_lines_are_left_out"),
        (TRAINING, "test_six_kills_change_no_table"),
    ],
    "the first two seeds": [
        (ABLATE, "test_the_other_seeds_of_a_variant_that_fails_at_once_are_skipped")
    ],
    "a cell cannot be started": [
        (ABLATE, "test_a_cell_that_never_starts_fails_in_the_end"),
        (ABLATE, "test_too_many_open_files_only_delay_a_cell"),
    ],
    "the terminal or the reader": [
        (OUTPUT, "test_a_run_goes_on_without_a_reader_of_its_output"),
        (OUTPUT, "test_a_run_goes_on_when_the_disk_of_its_log_is_full"),
    ],
    "TMPDIR is cleaned": [(OUTPUT, "test_tmpdir_may_be_long_and_may_be_cleaned_during_a_run")],
    "the machine runs out of memory": [
        (PROCESS, "test_a_rank_is_the_first_victim_of_the_out_of_memory_killer"),
        (PROCESS, "test_the_out_of_memory_killer_ends_the_leaking_cell_alone"),
        (TRAINING, "test_the_loss_of_a_data_worker_is_retried"),
    ],
    "a cell starts processes of its own": [
        (PROCESS, "test_no_process_outlives_its_cell"),
        (PROCESS, "test_kill_9_of_the_runner_leaves_no_process_in_its_own_session"),
    ],
    "`result.json` is damaged": [
        (FOLDER, "test_an_unreadable_result_is_set_aside"),
        (RUNNER, "test_a_result_with_another_identity_does_not_count"),
    ],
    "a plan, a result, a CSV file": [
        ("ablate/test_status.py", "test_an_unreadable_plan_is_skipped"),
        (DAMAGED, "test_an_unreadable_plan_skips_only_its_study"),
        (DAMAGED, "test_a_side_record_that_cannot_be_read_leaves_the_table"),
        (DAMAGED, "test_torn_arrays_of_a_cell_are_skipped_with_a_warning"),
    ],
    "the record of a decision cannot be read": [
        ("ablate/test_screening.py", "test_a_damaged_record_chooses_no_other_variants"),
        (
            "ablate/test_origin.py",
            "test_a_folder_with_a_damaged_record_belongs_to_no_other_file",
        ),
        ("report/test_sequential.py", "test_a_damaged_record_of_looks_is_kept_and_told"),
    ],
    "the output folder is on a file system without": [
        (LOCK, "test_a_file_system_without_locks_is_one_line"),
        (CLI, "test_a_file_system_without_locks_is_refused_before_anything_is_written"),
    ],
    "`torch.compile` fails": [
        (
            "training/test_compilation.py",
            "test_a_failed_compilation_trains_uncompiled_and_is_recorded",
        ),
        (
            "training/test_compilation.py",
            "test_an_explicit_compilation_that_fails_ends_the_cell_in_one_line",
        ),
    ],
    "any other exception": [(RUNNER, "test_a_failing_cell_does_not_affect_other_cells")],
    "a configuration that cannot be trained": [
        ("cells/test_failure.py", "test_every_end_has_a_class_and_a_reason"),
        ("ablate/test_inputs.py", "test_errors_in_the_code_of_the_user_are_left_to_the_cells"),
    ],
    "two runners work": [
        (RUNNER, "test_two_runners_run_each_cell_once"),
        (RUNNER, "test_a_failure_counts_for_both_runners"),
    ],
    "the lock belongs to a process that has ended": [
        (LOCK, "test_a_lock_of_a_dead_process_is_stale"),
        (LOCK, "test_one_of_many_takes_over_a_stale_lock"),
    ],
    "the lock belongs to another host": [
        (LOCK, "test_a_holder_elsewhere_is_dead_once_its_heartbeat_stops"),
        (LOCK, "test_a_holder_elsewhere_lives_while_its_heartbeat_changes"),
        (LOCK, "test_a_container_with_this_host_name_keeps_its_lock"),
    ],
    "the package is edited": [(CHANGES, "test_a_study_ends_with_the_package_with_which_it_began")],
    "a plug-in, a module beside it": [
        (CHANGES, "test_changes_beside_a_plugin_are_recorded_and_marked"),
        (CHANGES, "test_the_recorded_hash_is_that_of_the_executed_source"),
        (CHANGES, "test_a_data_file_that_changes_during_the_training_makes_the_result_stale"),
    ],
    "the code or the data changed": [
        (INPUTS, "test_status_and_dry_run_name_stale_cells"),
        (RERUN, "test_results_of_other_code_or_data_are_stale"),
    ],
    "`CUDA_VISIBLE_DEVICES` names no GPU": [
        ("ablate/test_slots.py", "test_a_name_of_no_gpu_is_refused"),
        ("ablate/test_slots.py", "test_cells_that_fall_back_to_the_cpu_are_reported_once"),
    ],
    "a folder cannot be written, a path": [
        (CLI, "test_an_unwritable_results_folder_is_one_error_line"),
        ("test_paths.py", "test_a_path_that_cannot_exist_gets_one_line"),
        ("test_paths.py", "test_an_error_of_the_file_system_gets_one_line"),
    ],
    "the records of a study are readable": [
        ("report/test_contained_faults.py", "test_any_changed_value_of_a_record_is_contained"),
        ("report/test_contained_faults.py", "test_a_scaling_that_fails_leaves_the_studies"),
    ],
    "data is missing": [("ablate/test_inputs.py", "test_missing_data_starts_no_cell")],
}
"""Tests, as file and function, by the beginning of the row."""


def read_rows() -> list[str]:
    """Return the first cells of the table's rows, without the heading."""
    lines = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")]
    return rows[1:]


def test_every_row_has_tests() -> None:
    rows = read_rows()
    for row in rows:
        matches = [start for start in TESTS if row.startswith(start)]
        assert len(matches) == 1, row
    for start in TESTS:
        assert [row for row in rows if row.startswith(start)], start


@pytest.mark.parametrize("start", TESTS)
def test_the_tests_of_a_row_exist(start: str) -> None:
    for file, name in TESTS[start]:
        text = Path(ROOT, "tests", file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{file}: {name}"
