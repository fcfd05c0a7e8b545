"""What to do about an error, in Python's words: the library says which remedy it is, and its values."""

RESUME = 'on_existing="resume"'  # {resume}, where nobody has another way to go on

WORDS = {  # by name, in the order of the library's codes, the first of which is 1; {} is a value
    "resume_or_replace": 'go on with {resume}, or start over with on_existing="replace"',
    "replace": 'start over with on_existing="replace"',
    "restore_or_replace": 'restore a snapshot, or start over with on_existing="replace"',
    "other_path_or_replace": 'name another nvme_path, or start over with on_existing="replace"',
    "that_version_or_replace": 'use that version, or start over with on_existing="replace"',
    "its_settings_or_replace":
        'use the model and settings it was made with, name another nvme_path, or start over '
        'with on_existing="replace"',
    "copy_again_or_replace": 'copy it again, or start over with on_existing="replace"',
    "replace_and_keep_steps":
        'start over with on_existing="replace", and write the model at the end, or set '
        'commit_every to 1',
    "resume": 'the store is at its last commit, go on with {resume}',
    "repair_and_resume":
        '{}; the store is at its last commit, go on with {resume}',
    "check_drive_and_rewrite": 'check the drive; a run with {resume} brings it, and writes it anew',
    "check_drive_and_go_back":
        'check the drive; step {}, the last committed one, is not affected: {resume} goes '
        'back to it',
    "check_drive_and_roll_back":
        'check the drive; that is part of step {}, the last committed one: spillway store {} '
        '--rollback goes back to step {} if all of it is intact',
    "check_drive_and_restore":
        'check the drive; that is part of step {}, the last committed one, and no other is '
        'left; restore a snapshot, or start over with on_existing="replace"',
    "check_drive_and_replace":
        'check the drive; commit_every 0 keeps no step to go back to: start over with '
        'on_existing="replace"',
    "check_records_and_restore":
        'check the drive; restore a snapshot, or start over with on_existing="replace"',
    "no_step_is_left":
        'no intact step is left; restore a snapshot, or start over with '
        'on_existing="replace"',
    "nothing_was_changed":
        'step {} is overwritten or damaged and nothing was changed; restore a snapshot, or '
        'start over with on_existing="replace"',
    "check_path_or_begin": 'check the path, or make an engine without on_existing="resume"',
    "make_room_or_halve":
        'free some space, name another nvme_path, or set spillway.commit_every to 0 (half '
        'the disk, no resume: write the model at the end)',
    "raise_budget": 'set spillway.{} to "{}" or more',
    "raise_budget_or_halve":
        'set spillway.{} to "{}" or more, or spillway.commit_every to 0 (half the disk, no '
        'resume: write the model at the end)',
    "name_tag": 'name one with tag=',
    "name_another_tag": 'name another one with tag=',
    "import_unverified":
        'check the drive; if it was saved without any, make a snapshot of it with '
        'spillway.import_deepspeed(…, verify=False)',
    "say_steps_or_number": 'write the number',
    "reopen": 'make model and engine anew, with {resume}',
    "cut_short":
        'somebody cut the store short: restore a snapshot, or start over with on_existing="replace"',
    "renew_store": 'go on with {resume}, save a snapshot, and begin a new store with snapshot=',
    "its_states_or_snapshot":
        'go on with the spillway.states it was made with, or save a snapshot with them and begin '
        'a new store with snapshot=, which converts',
}
NAMES = (None, *WORDS)  # by code


def in_words(message, remedy, values, resume=RESUME):
    """`message` is in two parts, between which the words come."""
    before, after = message
    return before + WORDS[remedy].format(*values, resume=resume) + after
