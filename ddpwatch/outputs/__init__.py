"""What goes elsewhere than onto a screen: lines for scripts, and messages to other programs."""
