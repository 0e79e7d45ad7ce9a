"""The main job: conversations, the streaming client, outcomes, load, watchers, one run against one target."""
