"""What tests of mergefs use, and whoever writes a backend or a tool may: nothing here is needed to run it.

`mergefs.testing.crashes` finds out what a power cut may leave of any program that writes to a folder, not of mergefs
alone. The program is run once under strace; then every state that the disk may have held meanwhile is made as a folder
of its own, to be looked at:

    from mergefs.testing.crashes import can_record, crash_states, record

    recording = record([sys.executable, "backend.py", "put", "name"], folder)
    assert recording.code == 0, recording.output
    for state in crash_states(recording):
        state.write(crashed := tmp_path / "crashed")
        ...  # open what is in `crashed`, and check that nothing is half there
        assert not state.finished or is_there("name")  # what was reported stays
        shutil.rmtree(crashed)

Programs have to name the files that they rename, remove or make folders of by absolute paths: relative ones are not
seen. `can_record` tells whether there is a strace that may trace; tests are to be skipped otherwise. A program that
changes the folder in a way that is not known there (by hard links, with sendfile) is refused with `RecordError`.
"""
